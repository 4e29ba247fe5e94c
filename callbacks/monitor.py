"""What callbacks share that decide by a metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


def check_mode(kind: str, mode: str) -> None:
    """Refuse a mode that is not "min" or "max"."""
    if mode not in ("min", "max"):
        raise ValueError(f"{kind}(mode={mode!r}): expected 'min' (less is better) or 'max'.")


def is_better(value: float, than: float, mode: str, by: float = 0.0) -> bool:
    """Whether a value beats another by more than `by`. NaN and infinities beat nothing, and any number beats them."""
    if not math.isfinite(value):
        return False
    if not math.isfinite(than):
        return True
    return value < than - by if mode == "min" else value > than + by


def fresh_value(callback: Callback, trainer: Trainer, name: str, *, strict: bool = True) -> float | None:
    """The metric's value, if it was reduced at the present step.

    None: it is of an earlier step (an epoch without validation), or not there before the first validation.

    Raises:
        RuntimeError: it should be there and is not, or differs from rank to rank.
    """
    if trainer.metric_steps.get(name) == trainer.global_step:
        return float(trainer.callback_metrics[name])
    if name in trainer.callback_metrics or trainer.awaits_validation:
        return None
    value = trainer.monitored(name, type(callback).__name__, required=strict)
    return None if value is None else float(value)


def last_value(callback: Callback, trainer: Trainer, name: str, *, by_steps: bool) -> float:
    """The metric's newest reduced value, which may be of an earlier step; NaN where there can't be one yet.

    That is before the first validation of the fit, before the end of the first epoch that logs it, and, for who goes
    by the clock, before the first step that logs.

    Args:
        callback: wants it, for the message.
        trainer: the run.
        name: the metric.
        by_steps: asked at steps that were chosen beforehand: a value that none of `log_every_n_steps` has reduced
            is then a contradiction between two options.

    Raises:
        RuntimeError: it should be there and is not, or differs from rank to rank.
    """
    value = trainer.monitored(name, type(callback).__name__, required=False)
    if value is not None:
        return float(value)
    if by_steps and _waits_for(trainer, name) == "step":
        every = trainer.config.log_every_n_steps
        raise RuntimeError(
            f"{type(callback).__name__} monitors {name!r} at step {trainer.global_step}, where it is not known: it is a "
            f"value of training steps, and log_every_n_steps={every} reduces none before step {every}. Set "
            f"log_every_n_steps={trainer.global_step}, or less, or monitor a value of an epoch or a validation."
        )
    if not comes_later(trainer, name):
        trainer.monitored(name, type(callback).__name__)  # raises
    return math.nan


def comes_later(trainer: Trainer, name: str) -> bool:
    """Whether a metric that is not there may still come: by the first validation, or by what is logged already."""
    return trainer.awaits_validation or _waits_for(trainer, name) is not None


def _waits_for(trainer: Trainer, name: str) -> str | None:
    return None if trainer.active_log is None else trainer.active_log.waits_for(name)
