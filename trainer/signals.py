"""SIGTERM, SIGINT and SIGUSR1: a run saves and ends, all ranks at the same step.

While training, a handler only notes the signal. The control word tells the other ranks, and all leave together. Before
training there is nothing to save and nobody who asks: there a handler raises at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ..strategies.first_cause import PeerError
from .control import ControlWord

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
"""Those that end a run. Schedulers send SIGUSR1 as a warning that the time is nearly over."""

# Seconds in which the same signal again is the same wish: a terminal sends Ctrl-C to all processes, and torch's agent hands
# it on to its ranks once more.
_SAME_WISH = 2.0


class Preempted(SystemExit):
    """A signal ended the run. It ends the program with exit code 143, unless it is caught.

    What stands behind `fit` does not run: it would take an unfinished run for a complete one.
    """

    exit_code = 143
    status = "preempted"
    """As in status.json."""

    def __init__(self, number: int, text: str, *, agreed: bool = False) -> None:
        super().__init__(self.exit_code)
        self.signal, self.text, self.agreed = number, text, agreed
        """`agreed`: all ranks leave at this step, and have saved."""

    def __str__(self) -> str:
        return self.text


class Interrupted(Preempted, KeyboardInterrupt):
    """The same for SIGINT (Ctrl-C), with exit code 130; also a KeyboardInterrupt, for those who catch that."""

    exit_code = 130
    status = "interrupted"


def preempted(number: int, text: str, *, agreed: bool = False) -> Preempted:
    """The exception for this signal."""
    kind = Interrupted if number == signal.SIGINT else Preempted
    return kind(number, text, agreed=agreed)


def name_of(number: int) -> str:
    """As "SIGTERM"."""
    return signal.Signals(number).name


class SignalHandlers:
    """The handlers of one run, put in place inside `with`; what was there before is called, too, and comes back.

    A signal that is ignored stays ignored; one whose handler was not made in Python (by faulthandler, say) is left
    alone. Nothing is done outside the main thread, where Python allows no handlers.

    Args:
        enabled: False: do nothing.
        rank: this one, for the messages.
        note_exit: called with status, text and exit code before the same signal again ends the process.
    """

    def __init__(self, *, enabled: bool, rank: int, note_exit: Callable[[str, str, int], None] | None = None) -> None:
        self.control: ControlWord | None = None
        """Who is told; None: nobody asks for signals now, so a handler raises."""
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._rank, self._process, self._note_exit = rank, os.getpid(), note_exit
        self._previous: dict[int, Any] = {}
        self._received, self._at = 0, 0.0

    def __enter__(self) -> SignalHandlers:
        for number in SIGNALS if self._enabled else ():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if error is None and self._received:  # it came when training was over already
            raise self._raised()
        if isinstance(error, PeerError) and self.is_being_ended:
            error.is_known = True

    @property
    def exit_code(self) -> int:
        """What this process leaves with when its run is complete: a signal that came too late to matter ends the program."""
        return self._raised().exit_code if self._received else 0

    @property
    def is_being_ended(self) -> bool:
        """Whether SIGTERM has come: from a scheduler, or from a launcher that has seen another rank end."""
        return self._received == signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if os.getpid() != self._process:  # in a forked process, such as a loader's worker: it is no rank
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        now, again = time.monotonic(), bool(self._received)
        if again and number == self._received and now - self._at > _SAME_WISH:
            text = f"rank {self._rank} got {name_of(number)} again, and ends without saving"
            _say(text)
            if self._note_exit is not None:
                self._note_exit(preempted(number, text).status, text, 128 + number)
            exit_at_once(128 + number)
        if not again:
            self._received, self._at = number, now
            if self.control is not None:
                self.control.raise_signal(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if not again and self.control is None:
            raise self._raised()
        if not again and number == signal.SIGINT:
            _say(f"rank {self._rank} got SIGINT: the run saves and ends; once more ends it at once")

    def _raised(self) -> Preempted:
        return preempted(self._received, f"rank {self._rank} got {name_of(self._received)}")


@contextmanager
def deaf_to_workers() -> Generator[None]:
    """Let no worker of a loader raise here when it dies.

    Torch raises from its handler of SIGCHLD, in whatever the main thread does then: also where it tells of another error.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "SIGCHLD") or not callable(signal.getsignal(signal.SIGCHLD)):
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def exit_at_once(code: int) -> NoReturn:
    """End the process, without exit handlers, and the workers of its loaders, which may be stuck as well."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _say(text: str) -> None:
    """Print from a handler, which may have come in the middle of another print."""
    os.write(2, f"samestep: {text}\n".encode())
