"""The seam between the trainer and how processes cooperate: `Strategy`, for one process and for many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import clipping
from .environment import Environment
from .precision import Precision

T = TypeVar("T")
_NOTHING = nullcontext()


class Pending:
    """A value that is on its way over all ranks; `wait` returns it."""

    def __init__(self, value: Tensor, work: Any = None) -> None:
        self._value, self._work = value, work

    def wait(self) -> Tensor:
        """Block until the value has arrived, and return it."""
        if self._work is not None:
            self._work.wait()
        return self._value


class Strategy:
    """How the processes of a run cooperate. This base is right for one process.

    Subclass it, override what your processes do differently, and plug it in with
    `Trainer(strategy=MyStrategy())`. The trainer calls, in this order: `place` at construction;
    `setup` when a run starts; `wrap` once per fit; in every step `gradient_sync`, `autocast`,
    `backward`, `clip_gradients`, `optimizer_step`; the collectives where ranks must agree; `teardown`.

    Every collective takes a name, which is counted in `collectives`: what a step costs can be tested.
    """

    name: ClassVar[str] = "single_device"

    environment: Environment = Environment()
    device: torch.device = torch.device("cpu")
    precision: Precision = Precision()

    @property
    def rank(self) -> int:
        """This process's number among all, from 0."""
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its host, from 0."""
        return self.environment.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.environment.world_size

    # --- the life of a run -----------------------------------------------------------------

    def place(self, environment: Environment, device: torch.device, precision: Precision) -> None:
        """Take the process's place and device, before anything is started. Refuse what can't work here."""
        if environment.world_size > 1 and type(self).all_gather is Strategy.all_gather:
            raise ValueError(
                f"strategy={self.name!r} ({type(self).__name__}) on {environment.world_size} processes: it has no "
                "collectives, so each would train on its own. Use strategy='ddp' or a subclass of DDPStrategy, or start "
                "one process."
            )
        self.environment, self.device, self.precision = environment, device, precision

    def setup(self) -> None:
        """Meet the peers and take the device. Called at the start of every run; must be idempotent."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def teardown(self) -> None:
        """Let go of what `wrap` made. The process groups stay for the next run, until the process ends."""

    def wrap(self, step: nn.Module, *, manual: bool = False) -> Callable[..., Any]:
        """Return what to call for a training step.

        `step.forward(batch, batch_idx)` runs the task's `training_step`; the task's parameters are its
        own. With `manual`, `training_step` calls `backward` itself, any number of times.
        """
        return step.forward

    def check_same_parameters(self, module: nn.Module) -> None:
        """Raise on every rank if the parameters differ from rank to rank."""

    def patience(self) -> AbstractContextManager[None]:
        """The collectives inside wait for as long as it takes."""
        return _NOTHING

    def describe(self) -> dict[str, str]:
        """Lines for the panel shown at the start: label to value."""
        return {}

    # --- one step --------------------------------------------------------------------------

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Forward and backward inside it reduce gradients over the ranks, or (False) keep them local."""
        return _NOTHING

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which forward and backward compute in the precision's types."""
        return self.precision.autocast()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of `loss` (a scalar) to the parameters' `.grad`."""
        loss.backward(*args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters; see `clipping.clip_gradients`."""
        return clipping.clip_gradients(clipping.parameters_of(optimizer), limit, algorithm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters. False: the step was skipped, on all ranks alike."""
        optimizer.step()
        return True

    # --- collectives -----------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, name: str) -> Tensor:
        """Reduce `tensor` over the ranks in place by `sum`, `mean`, `min` or `max`, and return it."""
        return tensor

    def start_all_reduce_max(self, tensor: Tensor, *, name: str) -> Pending:
        """Start the elementwise maximum of a CPU tensor over the ranks, in place, without waiting."""
        return Pending(tensor)

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return every rank's `tensor` (same shape on all), stacked: `[world_size, *tensor.shape]`."""
        return tensor.unsqueeze(0)

    def gather_objects(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value` (anything that can be pickled), in the order of the ranks."""
        return [value]

    def broadcast(self, value: T, *, name: str = "broadcast") -> T:
        """Return rank 0's `value` (anything that can be pickled) on every rank."""
        return value

    def barrier(self, *, name: str = "barrier") -> None:
        """Return when every rank has arrived."""

    def broadcast_tensors(self, tensors: Iterable[Tensor], *, name: str) -> None:
        """Overwrite the tensors with rank 0's, in place. All ranks give the same shapes and types."""

    def broadcast_module(self, module: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers."""
        self.broadcast_tensors([*module.parameters(), *module.buffers()], name="module")

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers: each rank's BatchNorm has seen other samples."""
        self.broadcast_tensors(module.buffers(), name="buffers")

    # --- state -----------------------------------------------------------------------------

    def model_state(self, task: nn.Module) -> dict[str, Any]:
        """The task's own state dict: the user's keys, without any wrapper's prefix."""
        return task.state_dict()

    def load_model_state(self, task: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load what `model_state` returned."""
        task.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned."""
        optimizer.load_state_dict(state)
