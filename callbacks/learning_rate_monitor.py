"""Log the learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..trainer import Task, Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group, as the step that is logged used it.

    Names are `lr-<optimizer>`, with `/pg1`, `/pg2`, … for several groups; a scheduler's `name` replaces
    `lr-<optimizer>`.

    Args:
        logging_interval: "step": at the steps that are logged; "epoch": at the first step of each epoch; None: both, as the
            schedulers step.
        log_momentum: also log momentum (or the first beta), under `…-momentum`.
        log_weight_decay: also log weight decay, under `…-weight_decay`.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): expected 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self._used: dict[str, float] = {}
        self._epoch_begins = False

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Refuse a run in which nobody could see the rates."""
        if not trainer.loggers:
            raise ValueError("LearningRateMonitor needs a logger: Trainer(logger=True), or leave it out.")

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Note the rates of a step that will be logged, before a scheduler changes them."""
        due = self.logging_interval != "epoch" and (trainer.global_step + 1) % trainer.config.log_every_n_steps == 0
        if due or self._epoch_begins:
            self._used |= self._rates(trainer)
            self._epoch_begins = False

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Log the rates of the step before its validation: a checkpoint that is saved at its end is behind them."""
        self.on_train_step_end(trainer, task)

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Log the rates of the step."""
        if self._used:
            self._log(trainer, self._used)
            self._used = {}

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Let the first step of the epoch be logged. (A resumed run may begin inside one.)"""
        per_epoch = any(config.interval != "step" for config in trainer.lr_scheduler_configs)
        wanted = self.logging_interval == "epoch" or (self.logging_interval is None and per_epoch)
        self._epoch_begins = wanted and trainer.progress.batch_idx == 0

    @staticmethod
    def _log(trainer: Trainer, rates: dict[str, float]) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(rates, step=trainer.global_step)

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        rates: dict[str, float] = {}
        for index, optimizer in enumerate(trainer.optimizers):
            name = _name(trainer, optimizer, index)
            for number, group in enumerate(optimizer.param_groups, 1):
                key = f"{name}/pg{number}" if len(optimizer.param_groups) > 1 else name
                rates[key] = float(group["lr"])
                if self.log_momentum:
                    rates[f"{key}-momentum"] = float(
                        group["betas"][0] if "betas" in group else group.get("momentum", 0)
                    )
                if self.log_weight_decay:
                    rates[f"{key}-weight_decay"] = float(group.get("weight_decay", 0))
        return rates


def _name(trainer: Trainer, optimizer: Any, index: int) -> str:
    for config in trainer.lr_scheduler_configs:
        if config.name and getattr(config.scheduler, "optimizer", None) is optimizer:
            return config.name
    kinds = [type(other).__name__ for other in trainer.optimizers]
    kind = kinds[index]
    return f"lr-{kind}" if kinds.count(kind) == 1 else f"lr-{kind}-{kinds[:index].count(kind) + 1}"
