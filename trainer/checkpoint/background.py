"""What writes checkpoints while training goes on: one thread, one checkpoint at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

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


class _Worker:
    """A thread that does one work at a time. It is kept: to start one takes longer than to copy a small state."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        """Set while it has nothing to do."""
        self.idle.set()
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self.idle.clear()
        self._works.put(work)

    def end(self) -> None:
        """End the thread: now, or as soon as it is through with its work."""
        self._works.put(None)
        if self.idle.is_set():
            self._thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                work()
            finally:
                del work  # and the state that it wrote
                self.idle.set()


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
        self._worker: _Worker | None = None
        self._number = 0

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work at this moment, on this rank."""
        return self._worker is not None and not self._worker.idle.is_set()

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

        self._run(work)

    def make_way(self) -> None:
        """Wait until nothing is in flight, for the next checkpoint; count that, and say it the first time it is felt.

        Raises:
            CheckpointError: the one before could not be written.
        """
        began, waits = time.monotonic(), self.is_writing
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
            self._run(lambda: self._retire(job))
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
            if self._worker is not None:
                self._worker.end()
            self._job = self._worker = None
            self.memory.clear()
            if self._told and self.waits > 1:
                self._say(f"{self.waits} checkpoints waited for the one before them, {self.waited:.1f} s in all")
            self.waits, self.waited, self._told = 0, 0.0, False

    def _give_up(self) -> None:
        job, worker = self._job, self._worker
        if worker is not None:
            worker.idle.wait(_GRACE)
        if job is None or worker is None:
            return
        if not worker.idle.is_set():
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
        except Exception as error:  # the run goes on: there is a checkpoint too many, not one too few
            self._say(f"what the checkpoint {job.path} replaces could not be removed: {error}")

    def _run(self, work: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = _Worker()
        self._worker.do(work)

    def _join(self, doing: str) -> None:
        began = time.monotonic()
        while self._worker is not None and not self._worker.idle.wait(_PATIENCE):
            self._say(f"{doing}: training has waited {time.monotonic() - began:.0f} s for it")
