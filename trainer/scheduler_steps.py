"""Stepping the LR schedulers of a fit: each at its moments, with the metric that it decides by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .hooks import overrides
from .optimization import SchedulerConfig
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer


class SchedulerSteps:
    """Steps the schedulers that `configure_optimizers` returned; with manual optimization none, as the task does it."""

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._trainer, self._task = trainer, task

    def at(self, interval: str) -> list[SchedulerConfig]:
        """The schedulers that are stepped at this interval."""
        if not self._task.automatic_optimization:
            return []
        return [config for config in self._trainer.lr_scheduler_configs if config.interval == interval]

    def step(self, config: SchedulerConfig) -> None:
        """Step a scheduler, with the metric it monitors, if that was reduced in this epoch.

        Raises:
            RuntimeError: the metric was not logged, or differs from rank to rank.
        """
        metric = None
        if config.monitor is not None and config.needs_metric:
            metric = self._metric_of(config, config.monitor)
            if metric is None:
                return
        if overrides(self._task, "lr_scheduler_step", Task):
            self._task.lr_scheduler_step(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)  # pyright: ignore[reportArgumentType]

    def end_epoch(self) -> None:
        """Step those whose turn it is at the end of an epoch."""
        progress = self._trainer.progress
        progress.epochs_scheduled = progress.epochs_done
        for config in self.at("epoch"):
            if progress.epochs_done % config.frequency == 0:
                self.step(config)

    def end_validation(self) -> None:
        """Step those whose turn it is after a validation."""
        for config in self.at("validation"):
            if self._trainer.progress.validations % config.frequency == 0:
                self.step(config)

    def _metric_of(self, config: SchedulerConfig, name: str) -> Tensor | None:
        """The metric a scheduler decides by; None: there is no new one, and its step is left out.

        In an epoch without validation the value of an earlier one would count twice.
        """
        trainer = self._trainer
        if config.interval == "epoch":
            if name not in trainer.callback_metrics and trainer.awaits_validation:
                return None
            if trainer.metric_steps.get(name, float("inf")) <= trainer.progress.steps_before_epoch:
                return None
        return trainer.monitored(name, type(config.scheduler).__name__, required=config.strict)
