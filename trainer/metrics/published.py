"""The newest values of what was logged: kept for all who decide by them or show them, and handed to the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .log import Logged, MetricLog

if TYPE_CHECKING:
    from ..trainer import Trainer


class PublishedMetrics:
    """What a trainer tells of its metrics. All of it is reduced already: reading is never a collective."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.for_callbacks: dict[str, Tensor] = {}
        """The newest value of each metric, the same on every rank."""
        self.steps: dict[str, int] = {}
        """The optimizer step at which each of `for_callbacks` was reduced."""
        self.for_loggers: dict[str, Tensor] = {}
        """The newest values that the loggers were given."""
        self.for_progress_bar: dict[str, float] = {}
        """The newest values of those logged with `prog_bar=True`."""
        self._unshared: set[str] = set()
        self._of_training: set[str] = set()  # names, in this fit
        self._of_validation: set[str] = set()

    def begin_fit(self) -> None:
        """Let go of the names of the fit before; its values stay."""
        self._of_training, self._of_validation = set(), set()

    def publish(self, logged: Logged, log: MetricLog) -> None:
        """Hand reduced values to all who show, keep or decide by them.

        Raises:
            ValueError: a name is logged in training and in validation.
        """
        trainer = self._trainer
        if trainer.sanity_checking:
            return
        if trainer.fitting:
            self._refuse_shared_names(logged, log)
        self._unshared.update(log.unshared_names())
        tensors = _tensors(logged.for_callbacks)
        self.for_callbacks |= tensors
        self.steps |= dict.fromkeys(logged.for_callbacks, trainer.global_step)
        self.for_progress_bar |= logged.for_progress_bar
        if not logged.for_logger:
            return
        self.for_loggers |= tensors if logged.for_logger == logged.for_callbacks else _tensors(logged.for_logger)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(logged.for_logger, step=trainer.global_step)

    def monitored(self, name: str, who: str, *, required: bool = True) -> Tensor | None:
        """The newest value of a metric that is to be decided by.

        Args:
            name: as it was logged.
            who: wants it, for the message.
            required: raise where it is not there; False: return None.

        Raises:
            RuntimeError: it was not logged, or differs from rank to rank, so that ranks would decide differently.
        """
        if name in self.for_callbacks:
            return self.for_callbacks[name]
        if name in self._unshared:
            raise RuntimeError(
                f"{who} monitors {name!r}, which was logged with sync_dist=False or rank_zero_only=True: it differs from "
                "rank to rank, and so would the decision. Log it with sync_dist=True."
            )
        if not required:
            return None
        raise RuntimeError(
            f"{who} monitors {name!r}, which was not logged: expected one of "
            f"{', '.join(map(repr, self.for_callbacks)) or '(nothing was logged)'}.{self._without_validation()}"
        )

    def _without_validation(self) -> str:
        if not self._trainer.fitting or self._trainer.val_dataloaders:
            return ""
        return " There is no validation in this fit: it has no validation loader."

    def _refuse_shared_names(self, logged: Logged, log: MetricLog) -> None:
        """Refuse a name of both training and validation: a monitor would follow now the one, now the other.

        Raises:
            ValueError: names it.
        """
        names = logged.for_callbacks.keys() | logged.for_logger.keys() | logged.for_progress_bar.keys()
        own, others = self._of_training, self._of_validation
        if log.evaluation:
            own, others = others, own
        if both := names & others:
            name = min(both)
            raise ValueError(
                f"self.log({name!r}) in training and in validation: one name would stand for two values, and a monitor for "
                f"now the one, now the other. Expected two names, such as 'train/{name}' and 'val/{name}'."
            )
        own.update(names)


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
