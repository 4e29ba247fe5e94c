"""The checkpoints that a trainer writes: now, behind what is running, or by a thread; and how long they keep it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .background import BackgroundWriter, Following
from .state import save

if TYPE_CHECKING:
    from ..trainer import Trainer


class Saves:
    """Writes checkpoints of a trainer's run. What it is asked for, all ranks ask for, at the same place."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.writer = BackgroundWriter(trainer.strategy.say)
        """What writes while training goes on."""
        self.waiting: list[Path] = []
        """Checkpoints that were asked for inside a step, a validation or the end of an epoch: they are written behind it."""
        self.seconds = 0.0
        """How long they have kept this process, in all."""

    def write(self, path: Path, *, weights_only: bool = False) -> None:
        """Write a checkpoint; when what is running is over, where a run could not go on from the middle of it.

        Raises:
            CheckpointError: no run has begun, or it could not be written.
        """
        loop = self._trainer.training_loop
        if self._trainer.fitting and not weights_only and loop is not None and not loop.is_between_steps:
            self.waiting.append(path)
        else:
            with self._timed():
                save(self._trainer, path, weights_only=weights_only)

    def write_waiting(self) -> None:
        """Write the checkpoints that were asked for where none could be taken. Called by the loop, on all ranks."""
        waiting, self.waiting = self.waiting, []
        for path in dict.fromkeys(waiting):
            with self._timed():
                save(self._trainer, path)

    def start(self, path: Path, following: Following, *, weights_only: bool, background: bool) -> None:
        """Write a checkpoint, with `background` in the thread; arguments and errors as of `Trainer.start_checkpoint`."""
        with self._timed():
            save(self._trainer, path, weights_only=weights_only, following=following, background=background)

    @contextmanager
    def _timed(self) -> Generator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - begun
