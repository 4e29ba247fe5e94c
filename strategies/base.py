"""The seam between the trainer and how processes cooperate: `Strategy`, for one process and for many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import clipping
from .environment import Environment
from .fused import choose_fused, settle
from .precision import Precision

UnevenInputs = Literal["error", "stop", "join"]
T = TypeVar("T")
_NOTHING = nullcontext()


class Pending:
    """A value that is on its way over all ranks; `wait` returns it."""

    def __init__(self, value: Tensor, work: Any = None, name: str = "") -> None:
        self._value, self._work, self.name = value, work, name

    def wait(self) -> Tensor:
        """Block until the value has arrived, and return it."""
        if self._work is not None:
            self._work.wait()
        return self._value


def _restore_types(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give numbers of the state the types they were saved with: torch casts them to those of the parameters.

    NAdam's product of momenta is a float32 whatever it steps; in bfloat16 a resumed run would part from the one before.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(saved, Tensor) and saved.dim() == 0 and loaded.dtype != saved.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device, copy=True)


class Strategy:
    """How the processes of a run cooperate. This base is right for one process.

    Subclass it, override what your processes do differently, and plug it in with
    `Trainer(strategy=MyStrategy())`. The trainer calls, in this order: `place` and `check_step` at construction;
    `setup` when a run starts; `prepare_optimizers` and `wrap` in a fit; in every step `gradient_sync`, `autocast`,
    `backward`, `unscale_gradients`, `clip_gradients`, `optimizer_step`; the collectives where ranks must agree;
    `teardown`.

    Every collective takes a name, which is counted in `collectives`: what a step costs can be tested.
    """

    name: ClassVar[str] = "single_device"

    environment: Environment = Environment()
    device: torch.device = torch.device("cpu")
    precision: Precision = Precision()
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss at 16-mixed."""
    uneven_inputs: UnevenInputs | None = None
    """What happens when the ranks' training loaders don't end together; see `DDPStrategy`."""
    uneven_divisor: Literal["active", "initial"] = "active"
    """Whose mean a gradient is when some ranks have run out of data; see `DDPStrategy`."""
    fused_optimizer: bool | Literal["auto"] = "auto"
    """Whether optimizers use torch's fused kernels; see `fused.choose_fused`."""
    compiles: bool = False
    """Whether the step is compiled."""
    optimizer_in_backward: bool = False
    """Whether parameters are updated while the backward goes on; see `DDPStrategy`."""
    source: int = 0
    """The rank whose buffers are the model's: 0, or where that has run out of data, one that has not."""
    _scale: float = 0.0
    _computes: torch.dtype | None = None

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

    @property
    def started_again(self) -> bool:
        """Whether the job is known to have been started again, after a failure or with other hosts."""
        return self.environment.restart > 0

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether a parameter may go without a gradient in a step."""
        return False

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
        self.scaler = precision.make_scaler(device.type)
        self._computes = precision.computes
        self._scale = 0.0 if self.scaler is None else self.scaler.get_scale()

    def check_step(self, *, accumulation: int, clip_limit: float | None, skips: bool = False) -> None:
        """Refuse what can't go together with these options of the Trainer. Called at its construction."""

    def setup(self) -> None:
        """Meet the peers and take the device. Called at the start of every run; must be idempotent."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def teardown(self) -> None:
        """Let go of what `wrap` made. The process groups stay for the next run, until the process ends."""

    def prepare_optimizers(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """See the optimizers of a fit, before they step or load a state. `module` holds the parameters."""
        choose_fused(optimizers, module, self.fused_optimizer, scaled=self.scaler is not None)

    def wrap(self, step: nn.Module, *, manual: bool = False) -> Callable[..., Any]:
        """Return what to call for a training step.

        `step.forward(batch, batch_idx)` runs the task's `training_step`; the task's parameters are its
        own. With `manual`, `training_step` calls `backward` itself, any number of times.
        """
        return step.forward

    def check_same_parameters(self, module: nn.Module, *, name: str = "parameters of the epoch") -> None:
        """Raise on every rank if the parameters differ from rank to rank. `name` is that of the collective."""

    def patience(self) -> AbstractContextManager[None]:
        """The collectives inside wait for as long as it takes."""
        return _NOTHING

    def options(self) -> dict[str, str]:
        """What must be the same on all ranks, as text, by name: compared when a run starts."""
        return {}

    def describe(self) -> dict[str, str]:
        """Lines for the panel shown at the start: label to value."""
        return {}

    def exposed_communication(self) -> float | None:
        """Seconds of a step in which the backward only waits for the reduction of gradients; None: not measured."""
        return 0.0 if self.world_size == 1 else None

    def say(self, text: str) -> None:
        """Tell the user something that turned up during the run, once, from rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    # --- one step --------------------------------------------------------------------------

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Forward and backward inside it reduce gradients over the ranks, or (False) keep them local."""
        return _NOTHING

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forward and backward compute in the precision's types."""
        return _NOTHING if self._computes is None else torch.autocast(self.device.type, self._computes)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of `loss` (a scalar) to the parameters' `.grad`; scaled, where there is a `scaler`."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(*args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring scaled gradients to their true size, when they are complete: hooks and clipping see that."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_gradients(self, optimizer: Optimizer, limit: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of `optimizer`'s parameters; see `clipping.clip_gradients`."""
        return clipping.clip_gradients(clipping.parameters_of(optimizer), limit, algorithm)

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of `optimizer`'s parameters are without inf and NaN; the same on all ranks.

        The CPU waits for the device. Asked before they are clipped, and only with `skip_nonfinite`.
        """
        return bool(clipping.are_finite(clipping.parameters_of(optimizer)))

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters. False: the step was skipped, on all ranks alike, for its gradients are not finite."""
        if self.scaler is None:
            optimizer.step()
            return True
        self.scaler.step(optimizer)
        self.scaler.update()
        # Not told by hooks: a fused optimizer's `step` is called even when it skips. The one sync of the device in a step.
        before, self._scale = self._scale, self.scaler.get_scale()
        return self._scale >= before

    def join(self, active: Sequence[int]) -> None:
        """Called before each step that some ranks have no data for, with the ranks that have; at the end with all."""
        self.source = 0 if len(active) == self.world_size else active[-1]

    def check_weighted(self) -> None:
        """Refuse weighted losses, where gradients can't be corrected after the backward. Called in the first step."""

    # --- collectives -----------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, name: str, each_step: bool = False) -> Tensor:
        """Reduce `tensor` over the ranks in place by `sum`, `mean`, `min` or `max`, and return it.

        `each_step`: it belongs to every step, so it must cost nothing besides.
        """
        return tensor

    def start_all_reduce_max(self, tensor: Tensor, *, name: str, each_step: bool = False) -> Pending:
        """Start the elementwise maximum of a CPU tensor over the ranks, in place, without waiting."""
        return Pending(tensor)

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return every rank's `tensor` (same shape on all), stacked: `[world_size, *tensor.shape]`."""
        return tensor.unsqueeze(0)

    def gather_objects(self, value: T, *, name: str) -> list[T]:
        """Return every rank's `value` (anything that can be pickled), in the order of the ranks."""
        return [value]

    def background_gather(self) -> Callable[..., list[Any]] | None:
        """A `gather_objects` for the thread that writes checkpoints, beside what the main thread sends and receives.

        All ranks call it in the main thread. None: there is none, so checkpoints are written while training waits.
        """
        return self.gather_objects if self.world_size == 1 else None

    def broadcast(self, value: T, *, source: int = 0, name: str = "broadcast") -> T:
        """Return the `value` of rank `source` (anything that can be pickled) on every rank."""
        return value

    def barrier(self, *, name: str = "barrier") -> None:
        """Return when every rank has arrived."""

    def broadcast_tensors(self, tensors: Iterable[Tensor], *, source: int = 0, name: str) -> None:
        """Overwrite the tensors with those of rank `source`, in place. All ranks give the same shapes and types."""

    def broadcast_module(self, module: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers."""
        self.broadcast_tensors([*module.parameters(), *module.buffers()], name="module")

    def synchronize(self, module: nn.Module) -> None:
        """Make the ranks' modules equal, before an evaluation or a checkpoint: each BatchNorm has seen other samples.

        Trained parameters are equal already.
        """
        self.broadcast_tensors(module.buffers(), source=self.source, name="buffers")

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
        _restore_types(optimizer, state)
        settle(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The strategy's own state, the same on all ranks: what a resumed run needs. Plain types and tensors only."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(dict(state["scaler"]))
            self._scale = self.scaler.get_scale()

    def rank_state_dict(self) -> dict[str, Any]:
        """The strategy's state that is this rank's own, such as the error memory of a compressed reduction."""
        return {}

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `rank_state_dict` returned."""
