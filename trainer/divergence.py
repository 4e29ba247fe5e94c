"""When training diverges: steps that are not taken, the way back to a good state, and the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ..callbacks.wording import counted
from .checkpoint.state import state_keys
from .randomness import rng_state, set_rng_state

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .trainer import Trainer


class DivergedError(FloatingPointError):
    """The run can't go on: gradients or losses stay beyond all bounds. Raised on all ranks at the same step."""


class SkippedSteps:
    """Skips the steps whose gradients are not finite, and ends the run when there are too many in a row.

    All ranks decide alike without a word: after the reduction they hold the same gradients.

    Args:
        strategy: looks at the gradients.
        limit: steps in a row that may be skipped.
    """

    def __init__(self, strategy: Strategy, limit: int) -> None:
        self._strategy, self._limit = strategy, limit
        self.total = self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """The counters: those of a resumed run go on."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from there."""
        self.total, self.in_a_row = state["total"], state["in_a_row"]

    def must_skip(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Whether the step is not to be taken; `step`: those that were taken so far.

        Raises:
            DivergedError: too many in a row.
        """
        if self._strategy.gradients_are_finite(optimizer):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            raise DivergedError(
                f"the gradients were inf or NaN in {counted(self.in_a_row, 'step')} in a row, after step {step}: expected "
                f"skip_nonfinite={self._limit} at most. Lower the learning rate, clip, or look for what makes them with "
                "Trainer(detect_anomaly=True)."
            )
        if self.total & (self.total - 1) == 0:  # the first, the second, the fourth, …
            self._strategy.say(
                f"samestep: the step after step {step} is skipped: its gradients are inf or NaN "
                f"({counted(self.total, 'step')} so far, {self.in_a_row} in a row)"
            )
        return True


class Snapshot(TypedDict):
    """What training had come to at a step: everything but the position in the data. Plain, so a checkpoint can hold it."""

    step: int
    shared: dict[str, Any]
    """Model, optimizers, schedulers, callbacks and strategy: the same on all ranks."""
    rank: dict[str, Any]
    """The strategy's state of this rank alone, and its random numbers."""


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copy the state of training, to the CPU."""
    strategy = trainer.strategy
    shared = {
        "model": _copied(strategy.model_state(trainer.task)),
        "optimizers": [_copied(strategy.optimizer_state(optimizer)) for optimizer in trainer.optimizers],
        "schedulers": [_copied(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "callbacks": {key: _copied(callback.state_dict()) for key, callback in _followers(trainer)},
        "strategy": _copied(strategy.state_dict()),
    }
    return {
        "step": trainer.global_step,
        "shared": shared,
        "rank": {"strategy": _copied(strategy.rank_state_dict()), "rng": rng_state()},
    }


def go_back(trainer: Trainer, snapshot: Snapshot) -> None:
    """Bring training back to a snapshot. The position in the data stays: the run goes on with samples it has not seen."""
    strategy, shared, rank = trainer.strategy, snapshot["shared"], snapshot["rank"]
    strategy.load_model_state(trainer.task, shared["model"])
    for optimizer, state in zip(trainer.optimizers, shared["optimizers"], strict=True):
        strategy.load_optimizer_state(optimizer, copy.deepcopy(state))
    for config, state in zip(trainer.lr_scheduler_configs, shared["schedulers"], strict=True):
        config.scheduler.load_state_dict(copy.deepcopy(state))
    for key, callback in _followers(trainer):
        if key in shared["callbacks"]:
            callback.load_state_dict(copy.deepcopy(shared["callbacks"][key]))
    strategy.load_state_dict(shared["strategy"])
    strategy.load_rank_state_dict(rank["strategy"])
    set_rng_state(rank["rng"])
    trainer.progress.global_step = snapshot["step"]


def _followers(trainer: Trainer) -> list[tuple[str, Any]]:
    """Callbacks whose state belongs to the parameters' (an average of them), and not to the run's files and decisions."""
    keyed = zip(state_keys(trainer.callbacks), trainer.callbacks, strict=True)
    return [
        (key, callback) for key, callback in keyed if not callback.monitors and not callback.keeps_state_in_rollback
    ]


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(state, (list, tuple)):
        return type(state)(_copied(value) for value in state)  # pyright: ignore
    return copy.deepcopy(state)
