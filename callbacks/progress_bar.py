"""Progress on the terminal: a bar, or a line now and then where the output is no terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class ProgressBar(Callback):
    """Shows epoch, batch, speed and the metrics logged with `prog_bar=True`, from rank 0.

    It reads only values that were reduced already: showing never waits for the device.

    Args:
        refresh_seconds: how often to draw the bar.
        line_seconds: how often to print a line where stderr is no terminal (a file, a pipe); each epoch's end
            prints one, too.
    """

    monitors: ClassVar[bool] = True

    def __init__(self, refresh_seconds: float = 0.1, line_seconds: float = 10.0) -> None:
        self.refresh_seconds, self.line_seconds = refresh_seconds, line_seconds
        self._bar: Any = None
        self._side_bar: Any = None
        self._next = math.inf
        self._interval = refresh_seconds
        self._started = (0.0, 0)

    # --- training --------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Start a bar for the epoch."""
        if not trainer.is_global_zero:
            return
        terminal = sys.stderr.isatty()
        self._interval = self.refresh_seconds if terminal else self.line_seconds
        now = time.monotonic()
        self._next, self._started = now + self._interval, (now, trainer.progress.batch_idx)
        if terminal:
            self._bar = _bar(trainer.num_training_batches, _epoch(trainer), trainer.progress.batch_idx)

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Show, when it is time to. Not after each batch: for a hook there, the loss is detached."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._show(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Show the end of the epoch, with its metrics."""
        if self._next == math.inf:
            return
        self._next = math.inf
        self._show(trainer)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, trainer: Trainer) -> None:
        done = trainer.progress.batch_idx
        if self._bar is not None:
            self._bar.set_postfix_str(_metrics(trainer), refresh=False)
            self._bar.n = done
            self._bar.refresh()
            return
        began, first = self._started
        speed = (done - first) / max(time.monotonic() - began, 1e-9)
        total = trainer.num_training_batches
        of = "" if math.isinf(total) else f"/{total:.0f}"
        shown = _metrics(trainer)
        print(
            f"{_epoch(trainer)} · batch {done}{of} · step {trainer.global_step} · {speed:.1f} batches/s"
            + (f" · {shown}" if shown else ""),
            file=sys.stderr,
            flush=True,
        )

    # --- evaluation: a bar that goes away ---------------------------------------------------

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Start a bar."""
        self._start_side_bar(trainer, "validate")

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Move it."""
        self._move_side_bar()

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Take it away."""
        self._end_side_bar()

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        """Start a bar."""
        self._start_side_bar(trainer, "test")

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Move it."""
        self._move_side_bar()

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        """Take it away."""
        self._end_side_bar()

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        """Start a bar."""
        self._start_side_bar(trainer, "predict")

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Move it."""
        self._move_side_bar()

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        """Take it away."""
        self._end_side_bar()

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Leave the terminal in order, also after an error."""
        self._next = math.inf
        self._end_side_bar()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _start_side_bar(self, trainer: Trainer, name: str) -> None:
        if trainer.is_global_zero and sys.stderr.isatty():
            self._side_bar = _bar(trainer.evaluation_batches, name, 0, leave=False)

    def _move_side_bar(self) -> None:
        if self._side_bar is not None:
            self._side_bar.update()

    def _end_side_bar(self) -> None:
        if self._side_bar is not None:
            self._side_bar.close()
            self._side_bar = None


def _bar(total: float, name: str, done: int, *, leave: bool = True) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=None if math.isinf(total) else total,
        desc=name,
        initial=done,
        leave=leave,
        dynamic_ncols=True,
        unit="batch",
    )


def _epoch(trainer: Trainer) -> str:
    most = trainer.config.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{most}" if most not in (None, -1) else "")


def _metrics(trainer: Trainer) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items())
