"""`Logger`: a callback that keeps what is logged. Only rank 0 is given anything to keep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class Logger(Callback):
    """Base of loggers. A logger of your own needs `log_metrics`; the rest has harmless defaults."""

    keeps_state_in_rollback: ClassVar[bool] = True
    run_folder: Path | None = None
    """The run's folder; set by the trainer."""
    first_step: int = 0
    """Steps up to here were logged by the run that is resumed; set by the trainer."""
    first_rewritten_step: int | None = None
    """The first step that a resumed run logs, whatever stands there already; None: it is not resumed. Set by the trainer."""
    newest: tuple[int, dict[str, float]] | None = None
    """The newest step, and all values it was told to `remember` of it."""
    begins_anew: bool = False
    """Whether a fit goes on from nothing, so that what is in the folder already is another run's; set by the trainer."""
    is_writer: bool = True
    """Whether this is rank 0; set by the trainer."""

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Learn where to write."""
        self.run_folder, self.is_writer = trainer.run_folder, trainer.is_global_zero

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Learn where a resumed run goes on; later steps of the run before are dropped."""
        self.first_step = trainer.global_step
        self.first_rewritten_step = None
        if trainer.resumed_from is not None:
            # Taken inside an epoch, which may end at this very step; then the values up to the checkpoint are known.
            is_open = trainer.progress.batch_idx > 0 and self.newest is not None
            self.first_rewritten_step = self.first_step if is_open else self.first_step + 1
        self.begins_anew = trainer.resumed_from is None and trainer.global_step == 0

    def remember(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the values of the newest step in the checkpoint: where it was taken between two points of one step, a
        resumed run must write one of them again, and the other not."""
        if self.newest is None or self.newest[0] != step:
            self.newest = (step, {})
        self.newest[1].update(metrics)

    def values_to_rewrite(self) -> dict[str, float]:
        """What a resumed run must log at `first_step`, after it has dropped what stood from `first_rewritten_step` on."""
        if self.newest is None or self.first_rewritten_step != self.first_step or self.newest[0] != self.first_step:
            return {}
        return self.newest[1]

    def state_dict(self) -> dict[str, Any]:
        """What was told to `remember`; on rank 0, where it is logged."""
        return {} if self.newest is None else {"step": self.newest[0], "metrics": dict(self.newest[1])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what was logged last."""
        if state_dict:
            self.newest = (state_dict["step"], dict(state_dict["metrics"]))

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Write out what is kept in memory."""
        self.finalize("success")

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep reduced values of one optimizer step. Called on rank 0 only, once for each step and name."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Keep the hyperparameters. Called on rank 0 only, when a fit starts."""

    def finalize(self, status: str) -> None:
        """Write out and close; more may be logged afterwards."""

    @property
    def experiment(self) -> Any:
        """What the logger writes with, for anything but metrics; on other ranks something that does nothing."""
        return Nothing()

    @property
    def log_dir(self) -> str | None:
        """The folder it writes into."""
        return None if self.run_folder is None else str(self.run_folder)


def free_name(path: Path) -> Path:
    """The path with a number behind its name, the first under which there is nothing: `metrics-1.jsonl`."""
    number, suffix = 1, "" if path.is_dir() else path.suffix
    while (free := path.with_name(f"{path.name.removesuffix(suffix)}-{number}{suffix}")).exists():
        number += 1
    return free


class SilentLogger(Logger):
    """Keeps nothing: what `fast_dev_run` puts in the place of loggers, so that `self.logger.experiment` works."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Do nothing."""


class Nothing:
    """Takes any call and does nothing: the writer of the ranks that don't write."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None  # pyright: ignore
