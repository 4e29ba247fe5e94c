"""`OrderedHook`: the base of hooks that need several collectives for a bucket."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .hook import CommHook, HookContext
from .worker import Worker, worker_for


@dataclass(frozen=True)
class Bucket:
    """The gradients of some parameters, one after the other in one flat tensor.

    `flat` is real: the parts of complex numbers lie side by side. `gradients` are views into DDP's own buffer, in the
    shapes of `parameters`. Both may be overwritten: they are the hook's until it returns. `step` counts the backwards
    that synchronized before this one.
    """

    flat: Tensor
    gradients: list[Tensor]
    parameters: list[Tensor]
    step: int


class OrderedHook(CommHook):
    """Calls `mean` for one bucket after the other, beside the backward (see `worker.py`).

    With more than one lane, buckets are dealt to the lanes in turn, by their index. Each lane has a worker and a group of
    its own, so one sends while another computes; state that buckets share must then not depend on their order.
    """

    lanes: ClassVar[int] = 1

    def __init__(self) -> None:
        self.step = 0
        """Backwards that synchronized."""
        self._context: HookContext | None = None
        self._lanes: list[tuple[Worker, dist.ProcessGroup]] = []

    @abstractmethod
    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        """Return the mean of `bucket.flat` over the ranks, in any collectives on `group`, which holds all ranks."""

    @property
    def context(self) -> HookContext:
        """What `setup` was given."""
        if self._context is None:
            raise RuntimeError(f"{type(self).__name__} has no process group yet: call setup(context) first.")
        return self._context

    def setup(self, context: HookContext) -> None:
        """Take the group, make those of the other lanes, and start the workers."""
        self.teardown()
        self.step, self._context = 0, context
        groups: list[dist.ProcessGroup | None] = [context.group]
        if context.device.type != "cuda":  # there, the streams see to it
            groups += [context.new_group(range(context.environment.world_size)) for _ in range(1, self.lanes)]
        self._lanes = [(worker_for(context.device), group) for group in groups if group is not None]

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue the bucket."""
        complex_numbers = bucket.buffer().is_complex()
        # Taken here and now: torch's object does not outlive the call.
        taken = Bucket(real(bucket.buffer()), bucket.gradients(), bucket.parameters(), self.step)
        self.step += bucket.is_last()
        if not self._lanes:
            raise RuntimeError(f"{type(self).__name__} has no process group yet: call setup(context) first.")
        worker, group = self._lanes[bucket.index() % len(self._lanes)]

        def work() -> Tensor:
            mean = self.mean(taken, group)
            return torch.view_as_complex(mean.view(-1, 2)) if complex_numbers else mean

        return worker.submit(work)

    def run(self, work: Callable[[dist.ProcessGroup], Tensor]) -> Tensor:
        """Do other collectives where the first lane's are done, and wait for them."""
        worker, group = self._lanes[0]
        return worker.submit(lambda: work(group)).wait()

    def teardown(self) -> None:
        """End the workers."""
        for worker, _ in self._lanes:
            worker.close()
        self._context, self._lanes = None, []


def real(tensor: Tensor) -> Tensor:
    """A flat real view of a tensor."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
