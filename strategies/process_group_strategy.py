"""Processes that meet in torch's process groups, and what they say to each other there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import process_groups
from .base import Pending, Strategy
from .environment import Environment
from .precision import Precision
from .same_model import check_same_parameters

T = TypeVar("T")
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Small tensors travel together, up to this many elements a bundle.
_BUNDLE_ELEMENTS = 1 << 20


class ProcessGroupStrategy(Strategy):
    """The collectives of `Strategy` over gloo (CPU) or NCCL (CUDA): the base of strategies for several processes.

    Args:
        timeout: how long a rank waits for the others in one collective before it fails.
        startup_timeout: the same until the first step is done: other ranks may be building a model or compiling. Default: 30 minutes, or
            `timeout` where that is longer.

    Raises:
        ValueError: a timeout is not above 0.
    """

    def __init__(self, *, timeout: timedelta = timedelta(minutes=10), startup_timeout: timedelta | None = None) -> None:
        for name, value in (("timeout", timeout), ("startup_timeout", startup_timeout)):
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):  # pyright: ignore
                raise ValueError(f"{name}={value!r}: expected a timedelta above 0, such as timedelta(minutes=10).")
        self.timeout = timeout
        self.startup_timeout = startup_timeout or max(timeout, timedelta(minutes=30))
        self.collectives: Counter[str] = Counter()
        """How often each was called, by its name."""
        self._groups: process_groups.ProcessGroups | None = None
        self.allowed = self.startup_timeout
        """How long collectives that begin now may take."""

    def place(self, environment: Environment, device: torch.device, precision: Precision) -> None:
        """Take the place; refuse a strategy that leaves each rank its own gradients."""
        steps = ("wrap", "gradient_sync", "backward", "unscale_gradients", "clip_gradients", "optimizer_step")
        if environment.world_size > 1 and all(getattr(type(self), name) is getattr(Strategy, name) for name in steps):
            raise ValueError(
                f"{type(self).__name__} on {environment.world_size} processes has collectives, but reduces no gradients, so "
                f"each rank would train on its own. Override one of {', '.join(steps)}, or use DDPStrategy."
            )
        super().place(environment, device, precision)

    def setup(self) -> None:
        """Join the process groups of the job."""
        super().setup()
        # Peers that never come are missed after the shorter one; gloo waits up to five times as long for a connection.
        self._groups = process_groups.join(self.environment, self.device, min(self.timeout, self.startup_timeout))
        self.allow(self.startup_timeout)

    def allow(self, timeout: timedelta) -> None:
        """Let collectives that begin from here on wait so long."""
        self.allowed = timeout
        for group in (self.groups.training, self.groups.control):
            _set_timeout(timeout, group)

    def check_same_parameters(self, module: nn.Module, *, name: str = "parameters of the epoch") -> None:
        """Compare the parameters' sums over the ranks: whatever a strategy does in a step, they are equal behind it."""
        check_same_parameters(module, partial(self.all_gather, name=name))

    @contextmanager
    def patience(self) -> Generator[None]:
        """Wait for a day in the collectives inside: others may be downloading. A rank that dies is seen at once."""
        before, self.allowed = self.allowed, timedelta(days=1)
        _set_timeout(self.allowed, self.groups.control)
        try:
            yield
        finally:
            self.allowed = before
            _set_timeout(self.allowed, self.groups.control)

    @property
    def started_again(self) -> bool:
        """Also where another host's agent has counted the restart, or none has."""
        return super().started_again or process_groups.started_again()

    # --- collectives -----------------------------------------------------------------------

    @property
    def groups(self) -> process_groups.ProcessGroups:
        """The process groups, joined by `setup`."""
        if self._groups is None:
            raise RuntimeError("the ranks have not met yet: collectives work inside fit, validate, test and predict.")
        return self._groups

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup:
        return self.groups.training if tensor.is_cuda else self.groups.control

    @contextmanager
    def named(self, name: str, *, announced: bool = True) -> Generator[None]:
        """Count the collective inside, and say its name if it fails.

        `announced`: before it, see that all ranks come to the same one. That asks the store: not for those of each step.
        """
        self.collectives[name] += 1
        if announced:
            self.groups.announce(name)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} could not finish the collective {name!r} with the other "
                f"{self.world_size - 1}: one of them has ended or did not come. Its own message says why. ({error})"
            ) from error

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, name: str, each_step: bool = False) -> Tensor:
        """Reduce over the ranks in place."""
        with self.named(name, announced=not each_step):
            dist.all_reduce(tensor, _OPERATIONS[op], group=self._group_of(tensor))
        return tensor

    def start_all_reduce_max(self, tensor: Tensor, *, name: str, each_step: bool = False) -> Pending:
        """Start the maximum on the control group, where it waits behind no gradient."""
        with self.named(name, announced=not each_step):
            work = cast("Any", dist.all_reduce(tensor, dist.ReduceOp.MAX, self.groups.control, async_op=True))
            return Pending(tensor, work, name)

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Gather over the ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.named(name):
            dist.all_gather(parts, tensor.contiguous(), group=self._group_of(tensor))
        return torch.stack(parts)

    def gather_objects(self, value: T, *, name: str) -> list[T]:
        """Gather pickled objects on the control group."""
        values: list[Any] = [None] * self.world_size
        with self.named(name):
            dist.all_gather_object(values, value, group=self.groups.control)
        return values

    def background_gather(self) -> Callable[..., list[Any]]:
        """Gather pickled objects on a group of its own, made at the first call: for as long as a disk may take."""
        with self.named("group of the checkpoints"):
            group = self.groups.for_checkpoints(self.startup_timeout)

        def gather(value: Any, *, name: str) -> list[Any]:
            values: list[Any] = [None] * self.world_size
            with self.named(name, announced=False):
                dist.all_gather_object(values, value, group=group)
            return values

        return gather

    def broadcast(self, value: T, *, source: int = 0, name: str = "broadcast") -> T:
        """Broadcast a pickled object on the control group."""
        values = [value]
        with self.named(name):
            dist.broadcast_object_list(values, src=source, group=self.groups.control)
        return values[0]

    def barrier(self, *, name: str = "barrier") -> None:
        """Wait for all ranks on the control group: the device is not touched."""
        with self.named(name):
            dist.barrier(group=self.groups.control)

    def broadcast_tensors(self, tensors: Iterable[Tensor], *, source: int = 0, name: str) -> None:
        """Broadcast the values of rank `source`, small tensors of one type and device bundled into one message."""
        bundles: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
        for tensor in tensors:
            lists = bundles.setdefault((tensor.dtype, tensor.device), [[]])
            if lists[-1] and sum(t.numel() for t in lists[-1]) + tensor.numel() > _BUNDLE_ELEMENTS:
                lists.append([])
            lists[-1].append(tensor)
        for bundle in (bundle for lists in bundles.values() for bundle in lists):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bundle])
            with self.named(name):
                dist.broadcast(flat, src=source, group=self._group_of(flat))
            with torch.no_grad():
                for tensor, part in zip(
                    bundle, cast("tuple[Tensor, ...]", flat.split([t.numel() for t in bundle])), strict=True
                ):
                    tensor.copy_(part.view_as(tensor))


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # pyright: ignore
