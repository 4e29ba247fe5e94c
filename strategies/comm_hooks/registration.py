"""`register`: hand a hook to DDP."""

# No `from __future__ import annotations` here: torch compares the annotations of `reduce` with the types themselves.
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .hook import CommHook


def register(model: DistributedDataParallel, hook: CommHook) -> None:
    """Let DDP reduce its buckets with the hook, which has been set up. Once for each DDP object.

    Raises:
        RuntimeError: from torch, when the model has a hook already, or a fused optimizer.
    """

    # torch insists on a plain function with these annotations, and on the name `bucket`.
    def reduce(hook: CommHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return hook.reduce(bucket)

    # torch refuses some functions by name (those with bf16); this one is seen as the hook's class in DDP's logging.
    reduce.__name__ = reduce.__qualname__ = type(hook).__name__
    model.register_comm_hook(hook, reduce)
