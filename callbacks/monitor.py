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
    """Whether a value beats another by more than `by`; NaN beats nothing, and any number beats NaN."""
    if math.isnan(value):
        return False
    if math.isnan(than):
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
