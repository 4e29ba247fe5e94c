"""Stop when a metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .callback import Callback
from .monitor import check_mode, fresh_value, is_better
from .wording import counted

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class EarlyStopping(Callback):
    """Ends the run when a metric has not got better for a while. All ranks decide by the same reduced value.

    Args:
        monitor: the metric's name.
        min_delta: a change of no more than this is no improvement.
        patience: checks without improvement that are put up with. The metric is checked after each validation
            (where it is logged there), else at each epoch's end.
        verbose: say when it got better, and why the run stops.
        mode: "min" or "max": which way is better.
        strict: raise when the metric is not there; False: wait for it.
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: True: check at the epoch's end only, not after a validation inside it.

    Raises:
        ValueError: an argument is impossible, or of another type.
    """

    monitors: ClassVar[bool] = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        check_mode("EarlyStopping", mode)
        if not isinstance(monitor, str) or not monitor:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _wrong("monitor", monitor, "the name of a logged metric")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:  # pyright: ignore
            raise _wrong("patience", patience, "a whole number of checks, 0 or more")
        if not _is_number(min_delta) or not 0 <= min_delta < math.inf:
            raise _wrong("min_delta", min_delta, "a number of 0 or more")
        thresholds = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        for name, value in thresholds.items():
            if value is not None and (not _is_number(value) or math.isnan(value)):
                raise _wrong(name, value, "a number, or None for no threshold")
        switches = {"verbose": verbose, "strict": strict, "check_finite": check_finite}
        if check_on_train_epoch_end is not None:
            switches["check_on_train_epoch_end"] = check_on_train_epoch_end
        for name, value in switches.items():
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _wrong(name, value, "True or False")
        self.monitor, self.min_delta, self.patience, self.verbose = monitor, min_delta, patience, verbose
        self.mode, self.strict, self.check_finite = mode, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.wait_count = 0
        """Checks since the last improvement."""
        self.stopped_epoch = 0
        """The epoch in which it stopped the run; 0 before."""
        self._best = math.nan
        self._resumed = False

    @property
    def best_score(self) -> Tensor:
        """The best value so far, a float64 scalar; NaN before the first."""
        return torch.tensor(self._best, dtype=torch.float64)

    @property
    def state_key(self) -> str:
        """Distinct for each metric."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """The wait counter and the best value."""
        return {"wait_count": self.wait_count, "stopped_epoch": self.stopped_epoch, "best_score": self._best}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on waiting where the run before had got to."""
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self._best = state_dict["best_score"]
        self._resumed = True

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Stop a resumed run that had been stopped, unless there is more patience now."""
        if self._resumed and self.wait_count >= max(1, self.patience):
            trainer.stop(self._worn_out())
        self._resumed = False

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Check after a validation inside an epoch."""
        inside = trainer.fitting and not trainer.sanity_checking and not trainer.epoch_is_over
        if inside and not self.check_on_train_epoch_end:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Check at the epoch's end, where a validation has just been."""
        self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        value = fresh_value(self, trainer, self.monitor, strict=self.strict)
        if value is None:
            return
        reason = self._reason_to_stop(value)
        if self.wait_count == 0 and self.verbose:
            trainer.print(f"EarlyStopping: {self.monitor} improved to {value:.6g}.")
        if reason:
            self.stopped_epoch = trainer.current_epoch
            trainer.stop(reason)
            if self.verbose:
                trainer.print(f"EarlyStopping: {reason}.")

    def _reason_to_stop(self, value: float) -> str:
        name = self.monitor
        if self.check_finite and not math.isfinite(value):
            return f"{name} = {value} is not finite (the best was {self._best:.6g})"
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
            self._improve(value)
            return f"{name} = {value:.6g} has passed the stopping threshold {self.stopping_threshold}"
        if self.divergence_threshold is not None and is_better(self.divergence_threshold, value, self.mode):
            return f"{name} = {value:.6g} is worse than the divergence threshold {self.divergence_threshold}"
        if is_better(value, self._best, self.mode, by=self.min_delta):
            self._improve(value)
            return ""
        self.wait_count += 1
        if self.wait_count < max(1, self.patience):
            return ""
        return self._worn_out()

    def _worn_out(self) -> str:
        return f"{self.monitor} has not been better than {self._best:.6g} for {counted(self.wait_count, 'check')}"

    def _improve(self, value: float) -> None:
        self._best, self.wait_count = value, 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"EarlyStopping({name}={value!r}): expected {expected}.")
