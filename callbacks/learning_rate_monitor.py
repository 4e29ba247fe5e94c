"""Log the learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..trainer import Task, Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group: the one that the step used, under that step's number.

    A step that was skipped has none, and a resumed run logs none twice. Names are `lr-<optimizer>`, with `/pg1`,
    `/pg2`, … for several groups, or `/<name>` where a group has a `name`. A scheduler's `name` replaces
    `lr-<optimizer>`; of several schedulers of one optimizer, which share its rate, the first that has one.

    Args:
        logging_interval: "step": every step; "epoch": at the end of an epoch, as its last step used it; None: at the
            steps that are logged (`log_every_n_steps`), and at the end of an epoch where a scheduler goes by epochs or
            validations.
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
        self._every: float = 1  # steps between those that are logged
        self._by_epoch = False
        self._step = 0  # the newest
        self._noted: dict[str, float] = {}  # of the step that is running, which may be skipped yet
        self._used: dict[str, float] = {}  # of the newest step, until they are logged

    def state_dict(self) -> dict[str, Any]:
        """The rates of a step that are logged at the end of its epoch."""
        return {"used": dict(self._used)} if self._used else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them back."""
        self._used = dict(state_dict.get("used", {}))

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Refuse a run in which nobody could see the rates, or tell them apart."""
        if not trainer.loggers:
            raise ValueError("LearningRateMonitor needs a logger: Trainer(logger=True), or leave it out.")
        for index, optimizer in enumerate(trainer.optimizers):
            keys = _keys(trainer, index)
            if len(set(keys)) < len(keys):
                raise ValueError(
                    f"LearningRateMonitor: two parameter groups of the {type(optimizer).__name__} have the same name "
                    f"({', '.join(keys)}): expected another for each, or none."
                )
        by = self.logging_interval
        self._every = {None: trainer.config.log_every_n_steps, "step": 1, "epoch": float("inf")}[by]
        self._by_epoch = by == "epoch" or (
            by is None and any(config.interval != "step" for config in trainer.lr_scheduler_configs)
        )
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Note the rates of a step that may be logged, before a scheduler changes them."""
        if self._by_epoch or (trainer.global_step + 1) % self._every == 0:
            self._noted |= self._rates(trainer, optimizer)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Log the rates of the step before its validation: a checkpoint that is saved at its end is behind them."""
        self.on_train_step_end(trainer, task)

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Log the rates of the step, if it was taken."""
        if not self._noted:
            return
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._used |= self._noted
            if self._step % self._every == 0:
                self._log(trainer)
        self._noted = {}

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Log the rates of the epoch's last step."""
        if self._by_epoch:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if self._used and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self._used, step=trainer.global_step)
        self._used = {}

    def _rates(self, trainer: Trainer, optimizer: Optimizer) -> dict[str, float]:
        rates: dict[str, float] = {}
        index = next(index for index, other in enumerate(trainer.optimizers) if other is optimizer)
        for key, group in zip(_keys(trainer, index), optimizer.param_groups, strict=True):
            rates[key] = float(group["lr"])
            if self.log_momentum:
                rates[f"{key}-momentum"] = float(group["betas"][0] if "betas" in group else group.get("momentum", 0))
            if self.log_weight_decay:
                rates[f"{key}-weight_decay"] = float(group.get("weight_decay", 0))
        return rates


def _keys(trainer: Trainer, index: int) -> list[str]:
    """The name of each group of an optimizer."""
    names = [_name(trainer, optimizer) for optimizer in trainer.optimizers]
    name = names[index]
    if names.count(name) > 1:
        name = f"{name}-{names[:index].count(name) + 1}"
    groups = trainer.optimizers[index].param_groups
    if len(groups) == 1:
        return [name]
    return [f"{name}/{group.get('name', f'pg{number}')}" for number, group in enumerate(groups, 1)]


def _name(trainer: Trainer, optimizer: Optimizer) -> str:
    for config in trainer.lr_scheduler_configs:
        if config.name and getattr(config.scheduler, "optimizer", None) is optimizer:
            return config.name
    return f"lr-{type(optimizer).__name__}"
