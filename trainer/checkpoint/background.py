"""What writes checkpoints while training goes on: one thread, one checkpoint at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...strategies import process_groups
from ..control import ControlWord
from .snapshot import HostMemory

# Seconds from which on a wait is said.
_FELT = 0.1
# Seconds between two lines that say what is waited for.
_PATIENCE = 60.0
# Seconds that a failing run gives the checkpoint that is being written: its peers wait for it meanwhile.
_GRACE = 15.0


@dataclass
class _Job:
    """A checkpoint that is being written, or was, with what came of it."""

    number: int
    path: Path
    settled: Callable[[Any], None]
    thread: threading.Thread | None = None
    result: Any = None
    error: BaseException | None = None


class BackgroundWriter:
    """Runs the writing of one checkpoint at a time in a thread of its own.

    What came of it is told in the main thread, on all ranks at the same place (`settle`): at the step at which the
    control word says that it is done, before the next checkpoint, or at the end of the run.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.memory = HostMemory()
        """For the snapshot that the thread writes from."""
        self.waits = 0
        """How often a checkpoint had to wait for the one before, in this run."""
        self.waited = 0.0
        """For how many seconds in all."""
        self._told = False
        self._job: _Job | None = None
        self._number = 0

    def start(self, path: Path, work: Callable[[], Any], settled: Callable[[Any], None], control: ControlWord) -> None:
        """Let the thread do `work`, which writes the checkpoint `path`; tell `settled` in the main thread what it returned."""
        assert self._job is None, "one at a time"
        self._number += 1
        job = self._job = _Job(self._number, path, settled)

        def run() -> None:
            try:
                job.result = work()
            except BaseException as error:  # raised in the main thread
                job.error = error
            control.written = job.number

        job.thread = threading.Thread(target=run, name=f"checkpoint {path.name}", daemon=True)
        job.thread.start()

    def make_way(self) -> None:
        """Wait until nothing is in flight, for the next checkpoint; count that, and say it the first time it is felt.

        Raises:
            CheckpointError: the one before could not be written.
        """
        job = self._job
        if job is None or job.thread is None:
            return
        began, waits = time.monotonic(), job.thread.is_alive()
        self.settle()
        if not waits:
            return
        seconds = time.monotonic() - began
        self.waits, self.waited = self.waits + 1, self.waited + seconds
        if seconds > _FELT and not self._told:
            self._told = True
            self._say(
                f"a checkpoint waited {seconds:.1f} s for the one before it, {job.path.name}, to be written: they come "
                "faster than the disk takes them. Save less often, or to a faster disk."
            )

    def settle(self, number: int | None = None) -> None:
        """Wait for what is in flight, and tell what came of it; with a `number`, only if it is that checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """
        job = self._job
        if job is None or job.thread is None or number not in (None, job.number):
            return
        began = time.monotonic()
        while job.thread.is_alive():
            job.thread.join(_PATIENCE)
            if job.thread.is_alive():
                self._say(f"still writing the checkpoint {job.path}, waited for since {time.monotonic() - began:.0f} s")
        self._job = None
        if job.error is not None:
            raise job.error
        job.settled(job.result)

    def close(self, *, failed: bool) -> None:
        """End with the run: wait for what is in flight; in a run that fails for a short time only.

        Raises:
            CheckpointError: the run was well, and the checkpoint could not be written.
        """
        try:
            if failed:
                self._give_up()
            else:
                self.settle()
        finally:
            self.memory.clear()
            if self._told and self.waits > 1:
                self._say(f"{self.waits} checkpoints waited for the one before them, {self.waited:.1f} s in all")
            self.waits, self.waited, self._told = 0, 0.0, False

    def _give_up(self) -> None:
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        job.thread.join(_GRACE)
        if job.thread.is_alive():
            process_groups.abandon()  # it may wait for a peer that never comes
            self._say(f"the checkpoint {job.path} is not complete yet: what is there of it is removed by the next run")
        elif job.error is not None:
            self._say(f"the checkpoint {job.path} was not completed: {job.error}")
        else:
            job.settled(job.result)
