"""TensorBoard event files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .logger import Logger, Nothing, free_name

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class TensorBoardLogger(Logger):
    """Writes scalars for TensorBoard: one event file for a run, written by rank 0.

    A resumed run hides the later steps of the run before. A run that begins anew first moves the event files of the run
    before out of the folder, into `tensorboard-1` beside it or the next free number, where TensorBoard shows them apart.

    Args:
        save_dir: folder of the events; default: `tensorboard` in the run's folder.
        name: a folder in it.
        version: a folder in that.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None = None, name: str = "", version: int | str | None = None
    ) -> None:
        self.save_dir = None if save_dir is None else os.fspath(save_dir)
        self.name, self.version = name, version
        self._writer: Any = None
        self._is_ours = False  # the event files are of this run, and not what another one left

    @property
    def log_dir(self) -> str | None:
        """The folder of the events."""
        if self.save_dir is not None:
            base = Path(self.save_dir)
        elif self.run_folder is not None:
            base = self.run_folder / "tensorboard"
        else:
            return None
        version = f"version_{self.version}" if isinstance(self.version, int) else self.version or ""
        return str(base / self.name / version)

    @property
    def experiment(self) -> Any:
        """torch's `SummaryWriter`, on rank 0; `logger.experiment.add_image(…)` is harmless elsewhere."""
        if not self.is_writer:
            return Nothing()
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            if self.log_dir is None:
                raise RuntimeError("TensorBoardLogger writes inside a run, or with save_dir=….")
            self._is_ours = self._is_ours or not _event_files(Path(self.log_dir))
            # What the run before logged behind the checkpoint is hidden: no step is shown twice.
            self._writer = SummaryWriter(self.log_dir, purge_step=self.first_rewritten_step)
            # Open until the program ends: a test after a fit goes into the same file.
            weakref.finalize(self, self._writer.close)
        return self._writer

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Open the file before the first step, which would have to wait for it."""
        super().on_fit_start(trainer, task)
        if not self.is_writer:
            return
        another_run = self.begins_anew and not self._is_ours
        if self._writer is not None and (another_run or self.first_rewritten_step is not None):
            self._writer.close()
            self._writer = None
        if another_run and self.log_dir is not None:
            _put_aside(Path(self.log_dir))
        self._is_ours = True
        _ = self.experiment
        self.log_metrics(self.values_to_rewrite(), self.first_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write each value as a scalar."""
        self.remember(metrics, step or 0)
        writer = self.experiment
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write them as text: TensorBoard's own table would need a second event file."""
        rows = "\n".join(f"| {name} | `{value}` |" for name, value in params.items())
        self.experiment.add_text("hyperparameters", f"| name | value |\n|---|---|\n{rows}", 0)

    def finalize(self, status: str) -> None:
        """Write out what is kept in memory."""
        if self._writer is not None:
            self._writer.flush()


def _put_aside(folder: Path) -> None:
    """Move the event files of another run into a folder of their own."""
    files = _event_files(folder)
    if files:
        aside = free_name(folder)
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)


def _event_files(folder: Path) -> list[Path]:
    return list(folder.glob("events.out.tfevents.*"))
