"""`CommHook`: how the gradients of a bucket become their mean over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..environment import Environment


@dataclass(frozen=True)
class HookContext:
    """What a hook works with.

    Args:
        group: all ranks, in a group of the hook's own (gloo on CPU, NCCL on CUDA): no other thread uses it.
        environment: this process's place among its peers.
        device: where the gradients are.
        names: `id(parameter)` to the parameter's name. State is kept by name: it survives another layout of the
            buckets, and another process. Frozen parameters are in it, too: they may be unfrozen later.
        new_group: make another group; collective: every rank calls it with the same ranks, and a rank that is not
            among them gets None.
    """

    group: dist.ProcessGroup
    environment: Environment
    device: torch.device
    names: Mapping[int, str]
    new_group: Callable[[Sequence[int]], dist.ProcessGroup | None]

    @classmethod
    def create(
        cls, module: nn.Module, environment: Environment, device: torch.device, timeout: timedelta
    ) -> HookContext:
        """Make the group, with the names of `module` (not wrapped in DDP). Collective over all ranks."""
        backend = "nccl" if device.type == "cuda" else "gloo"

        def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
            group: Any = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            return group if isinstance(group, dist.ProcessGroup) else None

        group = new_group(range(environment.world_size))
        assert group is not None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return cls(group, environment, device, names, new_group)


class CommHook(ABC):
    """How the gradients of a bucket become their mean over the ranks.

    DDP calls `reduce` once for each bucket in every backward that synchronizes, in the same order on every rank.
    `setup` comes first, and starts anew: state of an earlier run is loaded after it.
    """

    ranks_differ: ClassVar[bool] = False
    """True: the ranks' parameters differ between synchronizations (local SGD)."""

    def setup(self, context: HookContext) -> None:  # noqa: B027
        """Start anew with this group and these parameters. Collective over all ranks."""

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return, without waiting, the future mean of `bucket.buffer()`: a flat tensor of its size and type.

        The division by the number of ranks is the hook's. What the future fails with is raised from `backward`.
        """

    def after_step(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """Called after an optimizer step, on all ranks alike; not after one that was skipped."""

    def synchronize(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """Make the parameters equal on all ranks: called on all of them before evaluation and saving."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, in plain types and tensors: it loads with `weights_only=True`.

        The tensors are the live ones, as in an optimizer's: copy what must outlast the next step.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from what `state_dict` returned on this rank; after `setup`."""

    def teardown(self) -> None:  # noqa: B027
        """Let go of what `setup` made. Nothing is waited for: a peer may be dead."""
