"""The control word: how ranks agree, between steps, to stop, to save, or to leave after a signal.

A rank that wants something raises a flag. About once a second, at a step that all ranks know beforehand, the
flags are reduced over the ranks; the result is read one step later, so nobody waits for it. All ranks thus see
the same flags at the same step.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch

from ..strategies.base import Pending, Strategy

STOP = 1
"""End training after this step."""

SAVE = 2
"""A timed checkpoint is due."""

WRITTEN = 4
"""A checkpoint was written in the background, or failed to be. Never raised: it follows from `ControlWord.written`."""

LEAVE = 8
"""A signal came: save, and end the program."""

# Seconds between two words, about.
PERIOD = 1.0


class ControlWord:
    """The flags of this rank, and what all ranks agreed on."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._alone = strategy, strategy.world_size == 1
        self._raised = 0
        self._carried = 0  # agreed in a validation, and not told to the loop yet
        self._pending: Pending | None = None
        # Steps from one word to the next, and to go. Starts with every step: a step may take minutes.
        self._interval = 1
        self._countdown = 1
        self._steps = 0  # since the last word
        self._last = time.monotonic()
        self.agreed = 0
        """The flags all ranks saw at the end of the last step."""
        self.signal = 0
        """The signal that came on this rank; once LEAVE is agreed, that of all ranks. 0: none."""
        self.written: int = 0
        """Number of the newest checkpoint that this rank's writer is done with; set in the writer's thread."""
        self.agreed_written: int = 0
        """The highest `written` of all ranks, as far as they told it. With it comes `WRITTEN`, once."""

    @property
    def in_flight(self) -> bool:
        """Whether a word was started and not read yet. Never after an epoch's end, where ranks settle."""
        return self._pending is not None

    def raise_flag(self, flag: int) -> None:
        """Ask all ranks for this; no communication happens here."""
        self._raised |= flag

    def raise_signal(self, number: int) -> None:
        """Ask all ranks to leave, from a signal's handler. Never taken back."""
        self.signal = number

    def poll(self) -> int:
        """Return the flags that all ranks agreed on. Called by every rank after every step."""
        if self._alone:
            self.agreed = self._carried | self._raised | (LEAVE if self.signal else 0)
            self._raised = self._carried = 0
            if self.written != self.agreed_written:
                self.agreed_written = self.written
                self.agreed |= WRITTEN
            return self.agreed
        self._steps += 1
        if self._pending is not None:
            return self._read(self._pending)
        self.agreed, self._carried = self._carried, 0
        self._countdown -= 1
        if self._countdown <= 0:
            self._start()
        return self.agreed

    def leaves(self) -> bool:
        """Whether all ranks agreed to leave. Called by every rank between the batches of a validation.

        What else they agree on there comes up with the flags of the next step; those of the last one stay.
        """
        before = self.agreed
        self._carried |= self.poll()
        self.agreed = before
        return bool(self._carried & LEAVE)

    @contextmanager
    def pace_of_its_own(self) -> Generator[None]:
        """Inside, words come as often as what happens there allows: a validation's batches take another time than steps."""
        before = self.agreed
        self._carried |= self._finish()
        kept, now = (self._interval, self._countdown, self._steps), time.monotonic()
        behind = now - self._last
        self._interval, self._countdown, self._steps, self._last = 1, 1, 0, now
        yield
        self._carried |= self._finish()
        self.agreed = before
        self._interval, self._countdown, self._steps = kept
        self._last = time.monotonic() - behind

    def _finish(self) -> int:
        """Read the word that is in flight, if there is one."""
        return 0 if self._pending is None else self._read(self._pending)

    def settle(self) -> int:
        """As `poll`, but agree now: at the end of an epoch, where all ranks are."""
        flags = self._finish()
        if self._strategy.world_size > 1:
            self._start()
        if self._pending is not None:
            return flags | self._read(self._pending)
        return flags | self.poll()

    def _start(self) -> None:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        # Towards PERIOD, at most doubled at once: the first steps are slower than the later ones. By the steps that were
        # taken, since an epoch's end may come long before the interval is over.
        wanted = min(2 * self._interval, max(1, int(self._steps * PERIOD / max(elapsed, 1e-9))))
        self._steps = 0
        # A maximum of flags is their union, bit by bit; of negated intervals it is the shortest.
        word = torch.tensor([self._raised & STOP, self._raised & SAVE, self.signal, self.written, -wanted])
        self._raised = 0
        self._pending = self._strategy.start_all_reduce_max(word, name="control word")

    def _read(self, pending: Pending) -> int:
        stop, save, signal, written, negated_interval = cast("list[int]", pending.wait().tolist())
        self._pending = None
        self._interval = self._countdown = -negated_interval
        self.agreed, self._carried = self._carried | stop | save, 0
        if signal:
            self.signal, self.agreed = signal, self.agreed | LEAVE
        if written != self.agreed_written:
            self.agreed_written, self.agreed = written, self.agreed | WRITTEN
        return self.agreed
