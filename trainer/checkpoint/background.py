"""What writes checkpoints while training goes on: one thread, one checkpoint at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...strategies import process_groups
from ...strategies.first_cause import is_consequence
from ..control import ControlWord
from .snapshot import HostMemory

# Seconds from which on a wait is said.
_FELT = 0.1
# Seconds between two lines that say what is waited for.
_PATIENCE = 60.0
# Seconds that a failing run gives the checkpoint that is being written: its peers wait for it meanwhile.
_GRACE = 15.0


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Following:
    """What follows a checkpoint, in this order."""

    committed: Callable[[], None] = _nothing
    """It is on the disk. Called on rank 0, by whoever wrote it."""
    settled: Callable[[], None] = _nothing
    """All ranks know that it is. Called on all of them in the main thread, at the same step."""
    retire: Callable[[], None] = _nothing
    """Nobody is told of what it replaces any more: that may be removed. Called on all ranks."""


@dataclass
class _Job:
    """A checkpoint that is being written, or was, with what came of it."""

    number: int
    path: Path
    following: Following
    error: BaseException | None = None


class BackgroundWriter:
    """Runs the writing of one checkpoint at a time in a thread of its own.

    What came of it is told in the main thread, on all ranks at the same place (`settle`): at the step at which the
    control word says that it is done, before the next checkpoint, or at the end of the run. Only then does the thread
    remove what the checkpoint replaces.
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
        self._thread: threading.Thread | None = None
        self._number = 0

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work at this moment, on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, path: Path, write: Callable[[], None], following: Following, control: ControlWord) -> None:
        """Let the thread write the checkpoint `path`, while nothing else is in flight."""
        self._number += 1
        job = self._job = _Job(self._number, path, following)

        def work() -> None:
            try:
                write()
            except BaseException as error:  # raised in the main thread
                job.error = error
            control.written = job.number

        self._run(work, f"checkpoint {path.name}")

    def make_way(self) -> None:
        """Wait until nothing is in flight, for the next checkpoint; count that, and say it the first time it is felt.

        Raises:
            CheckpointError: the one before could not be written.
        """
        if self._thread is None:
            return
        began, waits = time.monotonic(), self._thread.is_alive()
        self.settle()
        if not waits:
            return
        seconds = time.monotonic() - began
        self.waits, self.waited = self.waits + 1, self.waited + seconds
        if seconds > _FELT and not self._told:
            self._told = True
            self._say(
                f"a checkpoint waited {seconds:.1f} s for the one before it to be written: they come faster than the disk "
                "takes them. Save less often, or to a faster disk."
            )

    def settle(self, number: int | None = None) -> None:
        """Wait for what is in flight, and tell what came of it.

        Args:
            number: that checkpoint only, and not for the removal of what it replaces; None: for everything.

        Raises:
            CheckpointError: it could not be written.
        """
        job = self._job
        if job is not None and number in (None, job.number):
            self._join(f"still writing the checkpoint {job.path}")
            self._job = None
            if job.error is not None:
                raise job.error
            job.following.settled()
            self._run(lambda: self._retire(job), f"what checkpoint {job.path.name} replaces")
        if number is None:
            self._join("still removing what the newest checkpoint replaces")

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
            self._job = self._thread = None
            self.memory.clear()
            if self._told and self.waits > 1:
                self._say(f"{self.waits} checkpoints waited for the one before them, {self.waited:.1f} s in all")
            self.waits, self.waited, self._told = 0, 0.0, False

    def _give_up(self) -> None:
        job, thread = self._job, self._thread
        if thread is not None:
            thread.join(_GRACE)
        if job is None or thread is None:
            return
        if thread.is_alive():
            process_groups.abandon()  # it may wait for a peer that never comes
            self._say(f"the checkpoint {job.path} is not complete yet: what is there of it is removed by the next run")
        elif job.error is not None:
            why = "another rank has ended" if is_consequence(job.error) else job.error
            self._say(f"the checkpoint {job.path} was not completed: {why}")
        else:
            job.following.settled()

    def _retire(self, job: _Job) -> None:
        try:
            job.following.retire()
        except OSError as error:  # the run goes on: there is a checkpoint too many, not one too few
            self._say(f"what the checkpoint {job.path} replaces could not be removed: {error}")

    def _run(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def _join(self, doing: str) -> None:
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._say(f"{doing}: training has waited {time.monotonic() - began:.0f} s for it")
        self._thread = None
