"""The counters of a run, which a checkpoint keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Where training stands. Modified by the loop; read-only for everybody else."""

    epoch: int = 0
    """The epoch that is running, from 0; while its end hooks run, it is still this one."""

    epochs_done: int = 0
    """Epochs that went through to their last batch."""

    global_step: int = 0
    """Optimizer steps that happened, in all."""

    batch_idx: int = 0
    """Micro-batches of this rank done in the running epoch."""

    batches_seen: int = 0
    """Micro-batches of this rank done in all epochs."""

    batches_since_validation: int = 0
    """Micro-batches since a validation was due; with `check_val_every_n_epoch=None` it counts across epochs."""

    validations: int = 0
    """Validations that went through, without sanity checks."""

    epochs_scheduled: int = 0
    """Epochs for which the schedulers with `interval="epoch"` have had their turn."""

    steps_before_epoch: int = 0
    """Optimizer steps before the running epoch: a metric reduced at an earlier step is none of this epoch's."""

    def state_dict(self) -> dict[str, Any]:
        """All counters."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters back; a finished epoch is left behind, so that the next one starts."""
        for name, value in state.items():
            setattr(self, name, value)
        self.begin_next_epoch()

    def begin_next_epoch(self) -> None:
        """Leave a finished epoch behind."""
        if self.epochs_done > self.epoch:
            self.epoch, self.batch_idx, self.steps_before_epoch = self.epochs_done, 0, self.global_step
