"""`OrderedHook`: the base of hooks that need several collectives for a bucket."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .hook import CommHook, HookContext
from .worker import Worker, worker_for


@dataclass(frozen=True)
class Bucket:
    """The gradients of some parameters, one after the other in one flat tensor.

    `flat` is real: the parts of complex numbers lie side by side. `gradients` are views into DDP's own buffer, in the
    shapes of `parameters`. Both may be overwritten: they are the hook's until it returns.
    """

    flat: Tensor
    gradients: list[Tensor]
    parameters: list[Tensor]
    is_last: bool

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> Bucket:
        """Take what is needed at once: torch's object does not outlive the call of the hook."""
        return cls(real(bucket.buffer()), bucket.gradients(), bucket.parameters(), bucket.is_last())


class OrderedHook(CommHook):
    """Calls `mean` for one bucket after the other, beside the backward (see `worker.py`)."""

    _context: HookContext | None = None
    _worker: Worker | None = None

    @abstractmethod
    def mean(self, bucket: Bucket) -> Tensor:
        """Return the mean of `bucket.flat` over the ranks, in any collectives; `bucket.flat` may be overwritten."""

    @property
    def context(self) -> HookContext:
        """What `setup` was given."""
        if self._context is None:
            raise RuntimeError(f"{type(self).__name__} has no process group yet: call setup(context) first.")
        return self._context

    @property
    def worker(self) -> Worker:
        """Where all collectives of the hook run."""
        if self._worker is None:
            raise RuntimeError(f"{type(self).__name__} has no process group yet: call setup(context) first.")
        return self._worker

    def setup(self, context: HookContext) -> None:
        """Take the group, and start the worker."""
        self.teardown()
        self._context = context
        self._worker = worker_for(context.device)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue the bucket."""
        complex_numbers = bucket.buffer().is_complex()
        taken = Bucket.of(bucket)

        def work() -> Tensor:
            mean = self.mean(taken)
            return torch.view_as_complex(mean.view(-1, 2)) if complex_numbers else mean

        return self.worker.submit(work)

    def teardown(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
        self._context = self._worker = None


def real(tensor: Tensor) -> Tensor:
    """A flat real view of a tensor."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
