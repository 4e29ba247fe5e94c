"""When a fit validates: behind which batches of an epoch, and at the end of which epochs."""

from __future__ import annotations

from ..callbacks.wording import counted
from .config import TrainerConfig
from .progress import Progress

_NEVER = float("inf")


class ValidationSchedule:
    """Plans the validations of a fit, one epoch at a time.

    Args:
        config: says how often.
        progress: the counters of the run. The loop counts the batches, this the validations.
        length: batches of an epoch; None where it can't be known.
        validates: whether the fit has anything to validate with.

    Raises:
        ValueError: the interval is longer than an epoch, or a share of it that comes to no batch.
    """

    due_at: float
    """The batch of the running epoch behind which a validation is due; inf: none is."""

    def __init__(self, config: TrainerConfig, progress: Progress, length: int | None, *, validates: bool) -> None:
        self._progress, self._length, self._validates = progress, length, validates
        self._every = config.check_val_every_n_epoch
        self._interval = _interval(config, length)
        self.due_at = _NEVER

    def begin_epoch(self, length: int | None) -> None:
        """Plan the next validation of the running epoch, from the batch where it stands; `length`: its batches."""
        self._length = length
        self._plan()

    def is_due_at_end(self) -> bool:
        """Whether the end of the running epoch is to be validated."""
        if not self._validates:
            return False
        if self._interval is None:
            return self._is_epoch_to_validate()
        return self._progress.batch_idx >= self.due_at

    def count(self) -> None:
        """A validation has gone through: plan the next."""
        # What an accumulation window delayed is not owed again: the next one is due where it would have been.
        if self._interval is not None:
            self._progress.batches_since_validation %= self._interval
        self._progress.validations += 1
        self._plan()

    def count_anew(self, before: int) -> None:
        """Where a resumed run has other batches: a validation that comes due by that alone is left out.

        To count samples instead would not spare it: the interval is one of batches, and is another number of samples now.

        Args:
            before: batches since the last one was due, as the checkpoint counts them. With an interval of them or more,
                the run was saved in front of a validation, which is still due.
        """
        if self._interval is not None and before < self._interval:
            self._progress.batches_since_validation %= self._interval

    def _plan(self) -> None:
        progress, interval = self._progress, self._interval
        self.due_at = _NEVER
        if self._every is not None and not progress.batch_idx:
            progress.batches_since_validation = 0  # each epoch is counted by itself
        if not self._validates or not self._is_epoch_to_validate():
            return
        if interval is None:
            self.due_at = _NEVER if self._length is None else self._length
            return
        # From where the last one was due, not from here: one that a run was saved in front of is still due.
        last = progress.batch_idx - progress.batches_since_validation
        due = last + interval if self._every is None else (last // interval + 1) * interval
        self.due_at = due if progress.batch_idx else max(1, due)

    def _is_epoch_to_validate(self) -> bool:
        return self._every is None or (self._progress.epoch + 1) % self._every == 0


def _interval(config: TrainerConfig, length: int | None) -> int | None:
    """Batches between validations; None: at the end of an epoch."""
    value = config.val_check_interval
    if value is None or (isinstance(value, float) and value == 1.0):
        return None
    if isinstance(value, int):
        if config.check_val_every_n_epoch is not None and length is not None and value > length:
            raise ValueError(
                f"val_check_interval={value} is more than the {counted(length, 'batch')} of an epoch: there would be no "
                "validation. Set check_val_every_n_epoch=None to count across epochs."
            )
        return value
    if length is None:
        raise ValueError(
            f"val_check_interval={value}: the training loader has no length to take a share of; give a number (int)."
        )
    if not int(length * value):
        raise ValueError(
            f"val_check_interval={value} of {counted(length, 'batch')} is none: expected {1 / length:.3g} or more."
        )
    return int(length * value)
