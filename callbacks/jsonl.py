"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .logger import Logger, Nothing, free_name

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class JSONLLogger(Logger):
    """Writes one line for each set of values, `{"step": 50, "train/loss": 0.31}`, by rank 0.

    NaN and infinities, which JSON has not, are written as strings. A resumed run drops the lines of later steps
    first, so no step stands in the file twice. A run that begins anew first renames the file of the run before, to
    `metrics-1.jsonl` or the next free number.

    Args:
        path: the file; default: `metrics.jsonl` in the run's folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else Path(path)
        self._file: IO[str] | None = None
        self._is_ours = False  # the file is of this run, and not what another one left

    @property
    def path(self) -> Path:
        """The file.

        Raises:
            RuntimeError: no run has started, and none was given.
        """
        if self._given is not None:
            return self._given
        if self.run_folder is None:
            raise RuntimeError("JSONLLogger writes inside a run, or with path=….")
        return self.run_folder / "metrics.jsonl"

    @property
    def experiment(self) -> Any:
        """The open file, on rank 0."""
        if not self.is_writer:
            return Nothing()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_ours = self._is_ours or not self.path.exists()
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        return self._file

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Drop the lines that the resumed run will write again; put another run's file aside."""
        super().on_fit_start(trainer, task)
        if not self.is_writer or not self.path.exists():
            return
        self.finalize("")
        if self.begins_anew:
            if not self._is_ours:
                self.path.rename(free_name(self.path))
            return
        self._is_ours = True
        first = self.first_step + 1 if self.first_rewritten_step is None else self.first_rewritten_step
        kept = [line for line in self.path.read_text("utf-8").splitlines(True) if _step(line) < first]
        beside = self.path.with_name(f".{self.path.name}.partial")
        beside.write_text("".join(kept), "utf-8")
        beside.replace(self.path)
        if again := self.values_to_rewrite():
            self._write({"step": self.first_step, **again})

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a line."""
        self.remember(metrics, step or 0)
        self._write({"step": step or 0, **metrics})

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write a line `{"step": 0, "hyperparameters": {…}}`."""
        self._write({"step": 0, "hyperparameters": dict(params)})

    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.experiment.write(json.dumps(finite) + "\n")
        self.experiment.flush()


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line torn by the end of the run before
