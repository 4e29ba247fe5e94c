"""When training diverges: steps that are not taken, the way back to a good state, and the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Snapshot:
    """What training had come to at a step, in memory: everything but the position in the data."""

    step: int
    model: Mapping[str, Any]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    callbacks: dict[str, Mapping[str, Any]]
    strategy: dict[str, Any]
    rank: dict[str, Any]
    """The strategy's state of this rank alone."""
    rng: dict[str, Any]

    @classmethod
    def take(cls, trainer: Trainer) -> Snapshot:
        """Copy the state of training, to the CPU."""
        strategy = trainer.strategy
        return cls(
            trainer.global_step,
            _copied(strategy.model_state(trainer.task)),
            [_copied(strategy.optimizer_state(optimizer)) for optimizer in trainer.optimizers],
            [_copied(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            {key: _copied(callback.state_dict()) for key, callback in _followers(trainer)},
            _copied(strategy.state_dict()),
            _copied(strategy.rank_state_dict()),
            rng_state(),
        )

    def restore(self, trainer: Trainer) -> None:
        """Bring training back to it. The position in the data stays: the run goes on with samples it has not seen."""
        strategy = trainer.strategy
        strategy.load_model_state(trainer.task, self.model)
        for optimizer, state in zip(trainer.optimizers, self.optimizers, strict=True):
            strategy.load_optimizer_state(optimizer, copy.deepcopy(state))
        for config, state in zip(trainer.lr_scheduler_configs, self.schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        for key, callback in _followers(trainer):
            if key in self.callbacks:
                callback.load_state_dict(copy.deepcopy(self.callbacks[key]))
        strategy.load_state_dict(self.strategy)
        strategy.load_rank_state_dict(self.rank)
        set_rng_state(self.rng)
        trainer.progress.global_step = self.step


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
