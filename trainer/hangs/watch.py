"""The watcher: a thread on each rank that tells the others, through the store, where the rank is.

Through the store, and not a process group: the main thread may be blocked in one, and two threads on one gloo group mix
their messages up. A step notes nothing for it: what the rank does is read from the main thread's stack, and whether it
moves from counters that are there anyway.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from ...strategies import process_groups
from ...strategies.error_file import record_error
from ...strategies.first_cause import End, text_of
from ...strategies.process_group_strategy import ProcessGroupStrategy
from ..signals import exit_at_once
from ..status import write_status
from .flight_recorder import collectives, write_dump
from .judgement import Beat, Hang, judge
from .whereabouts import LOADER, Whereabouts, stack_lines, whereabouts

if TYPE_CHECKING:
    from ..trainer import Trainer

_FOUND = "found"
# Ranks look one after the other, so that one says it, rank 0 if it can; but none later than this many periods.
_LATEST_TURN = 10
# A thread that takes less than this share of the time waits.
_IDLE = 0.02
_TELLS_PROCESSOR_TIME = hasattr(time, "pthread_getcpuclockid")  # of another thread; macOS does not


class HangError(RuntimeError):
    """The ranks wait for one that does not come; the message says who and where."""


class HangWatch:
    """Watches one run of a Trainer on several ranks, from `start` to `stop`.

    Args:
        trainer: the run.
        strategy: its strategy.
        store: of this run alone, with a connection of its own.
        limit: seconds without progress after which it is said who waits for whom.
        exits: end the process then.
    """

    def __init__(
        self, trainer: Trainer, strategy: ProcessGroupStrategy, store: dist.Store, limit: float, *, exits: bool
    ) -> None:
        self._trainer, self._strategy, self._store = trainer, strategy, store
        # A connection of the reader's own: one that waits for an answer keeps all others from using it.
        self._reading: Any = cast("Any", store).clone() if hasattr(store, "clone") else store
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._limit, self._exits = limit, exits
        self._period = min(1.0, limit / 10)
        self._silence = max(3 * self._period, limit / 2)
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samestep hang watch", daemon=True)
        self._reader: threading.Thread | None = None
        self._progress: Any = None
        self._moved = self._sampled = self._answered = time.monotonic()
        self._worked = self._looked = self._moved
        self._processor_time = 0.0
        self._phase = ""
        self._longest: dict[str, float] = {}  # pauses that ended by themselves, by what the rank did
        self._starting, self._store_missed = True, False
        self._found_at: Any = None
        self._told = self._stumbled = False
        self._beat = Beat(self._rank, 1, time.time(), 0.0, 0, "the start", "", limit, limit)
        self.hang: Hang | None = None
        """What is wrong now, as far as it is known on this rank. It goes when the rank moves again; a run that fails keeps it."""

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._tell()
        self._thread.start()

    def stop(self) -> None:
        """End the threads. One that waits for a store that does not answer any more is left to end with the process."""
        self._ended.set()
        for thread in (self._thread, self._reader):
            if thread is not None:
                thread.join(timeout=2 * self._period + 1)
        if self.hang is not None and self._trainer.progress.batches_seen != self._found_at[1]:
            self._goes_on()  # and came to its end before the next look

    # --- what this rank tells --------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._period):
                try:
                    self._look()
                except Exception as error:  # of a stack that changed meanwhile, say: the run does not end for it
                    self._stumble(error)
                self._tell()
                self._read_on_if_stuck()
        except dist.DistError:
            return  # whoever keeps the store has ended: that is told elsewhere

    def _stumble(self, error: Exception) -> None:
        """Say that a look failed, once: the watch goes on."""
        if not self._stumbled:
            self._stumbled = True
            _say(
                f"samestep: the hang watch of rank {self._rank} could not look at the run, and goes on: "
                f"{type(error).__name__}: {text_of(error)}"
            )

    def _tell(self) -> None:
        self._store.set(_key(self._rank), json.dumps(asdict(self._beat)))

    def _look(self) -> None:
        """Take a sample of the main thread, and make the beat."""
        frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return
        now = time.monotonic()
        if now - self._looked > self._silence:
            self._moved = self._worked = now  # the whole process was stopped: it has not had its time yet
        self._looked, idle = now, self._is_idle(now)
        if not idle or not _TELLS_PROCESSOR_TIME:
            self._worked = now
        here = whereabouts(frame, idle=idle)
        counters = self._counters()
        if self.hang is not None and counters != self._found_at:
            self._over()
        progress = (counters, here.phase, here.waits)
        if progress != self._progress:
            if self._phase:
                self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), now - self._moved)
            self._progress, self._moved = progress, now
            self._phase = "" if here.waits else here.phase
        age, long = now - self._moved, max(self._limit, self._strategy.allowed.total_seconds() / 2)
        if (self._starting and not self._sleeps_in_sanity_check(here, now)) or (here.takes_long and not here.waits):
            patience = long
        else:  # what took long before may take long again
            usual = 0.0 if here.waits else 2 * self._longest.get(here.phase, 0.0)
            patience = min(long, max(self._limit, usual))
        waits, stack, counted = here.waits, (), None
        if age > self._limit / 2:
            counted, stack = collectives(), tuple(stack_lines(frame))
            # A GPU runs behind the program, which waits where it next looks at it.
            if counted is not None and counted.begun > counted.done and self._strategy.device.type == "cuda":
                waits = waits or "a collective of the device"
        self._beat = Beat(
            self._rank, self._beat.number + 1, time.time(), age, self._trainer.global_step, here.where, waits, patience,
            long, None if counted is None else counted.begun, stack,
        )  # fmt: skip

    def _counters(self) -> tuple[Any, ...]:
        """Numbers of which one grows whenever the run moves."""
        trainer, progress, log = self._trainer, self._trainer.progress, self._trainer.active_log
        batches = 0 if log is None else sum(tuple(log.batches.values()))
        if (batches or (trainer.fitting and trainer.validating)) and not trainer.sanity_checking:
            self._starting = False  # also where all of the first epoch lay between two looks
        collectives = sum(tuple(self._strategy.collectives.values()))
        # `stop` asks for the second.
        return (progress.epoch, progress.batches_seen, progress.batch_idx, progress.global_step, batches, collectives)

    def _sleeps_in_sanity_check(self, here: Whereabouts, now: float) -> bool:
        """Whether the rank does nothing in the sanity check. That is part of the start, but what takes long there works."""
        asleep = bool(here.waits) or now - self._worked >= self._limit
        return self._trainer.sanity_checking and asleep and here.phase != LOADER

    def _is_idle(self, now: float) -> bool:
        """Whether the main thread took no processor time since the last sample. True where that can't be told."""
        if not _TELLS_PROCESSOR_TIME:
            return True
        used = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        before, self._processor_time = self._processor_time, used
        elapsed, self._sampled = now - self._sampled, now
        return used - before < _IDLE * elapsed

    # --- what the others tell --------------------------------------------------------------

    def _read_on_if_stuck(self) -> None:
        """See to it that a thread of its own reads the beats: the store may be the one that does not answer."""
        if self._beat.age < self._limit / 2:
            return
        if self._reader is None or not self._reader.is_alive():
            self._answered = time.monotonic()
            self._reader = threading.Thread(target=self._read, name="samestep hang reader", daemon=True)
            self._reader.start()
            return
        unanswered = time.monotonic() - self._answered > self._limit
        if unanswered and self._beat.age >= self._beat.patience and not self._store_missed:
            self._store_missed = True
            where = self._beat.waits or self._beat.where
            self._found(Hang(
                self._beat.step, f"no progress for {self._beat.age:.0f} s at step {self._beat.step}: rank {self._rank} is in {where}, and the "
                "store through which the ranks tell where they are does not answer: the process that keeps it is stopped, or "
                "its host is gone (rank 0's, or torchrun's on the first host)", (), certain=False, rank=0,
            ), tells=True)  # fmt: skip

    def _read(self) -> None:
        """While this rank does not move, look at the others, and say what is wrong."""
        turn = min(self._rank, _LATEST_TURN) * self._period
        heard: dict[int, tuple[int, float]] = {}
        try:
            while self._beat.age > self._limit / 2 and not self._ended.is_set():
                known = _get(self._reading, _FOUND)
                found: dict[str, Any] = json.loads(known) if known else {}
                if self.hang is None and found.get("hang"):
                    self._found(Hang(**found["hang"]), tells=False)
                elif self.hang is None and self._beat.age > self._limit / 2 + turn:
                    hang = judge(self._listen(heard), self._silence)
                    if time.monotonic() - self._answered > self._silence:
                        heard.clear()  # it was this process that was stopped, or the store: nobody else was silent
                    elif hang is not None and self._beat.age >= self._limit + turn:
                        mine = self._finding(hang)
                        if self._reading.compare_set(_FOUND, known, mine).decode() == mine:
                            self._found(hang, tells=True)
                elif self.hang is not None and self.hang.certain and self._beat.age >= 2 * self._limit:
                    self._end(self.hang)
                self._answered = time.monotonic()
                self._ended.wait(self._period)
        except dist.DistError:
            return
        except Exception as error:  # the next period begins anew
            self._stumble(error)

    def _listen(self, heard: dict[int, tuple[int, float]]) -> list[Beat]:
        """The newest beat of every rank. `heard`: the number of the last one, and when it was new."""
        beats: list[Beat] = []
        now = time.monotonic()
        for rank in range(self._world_size):
            told = _get(self._reading, _key(rank))
            beat = Beat(**json.loads(told)) if told else Beat(rank, 0, 0.0, 0.0, 0, "", "", 0.0, 0.0)
            number, since = heard.setdefault(rank, (beat.number, now))
            if number != beat.number:
                since = now
                heard[rank] = (beat.number, now)
            beats.append(replace(beat, silent=now - since, stack=tuple(beat.stack)))
        return beats

    def _found(self, hang: Hang, *, tells: bool) -> None:
        """Keep what is wrong, leave what helps to find out why, and end the process, if that is wanted."""
        if self.hang is not None:
            return
        self.hang, self._found_at, self._told = hang, self._counters(), tells
        if tells:
            _say(f"{hang.text()}\n  {self._what_now(hang)}")
        if self._trainer.writes:
            write_dump(Path(self._trainer.run_folder) / "hangs" / f"step-{hang.step:08d}", self._rank)
        if self._exits:
            self._end(hang)

    def _end(self, hang: Hang) -> None:
        """End this process. The peers, which lose it now, find in the store why; the first to tell it writes the status."""
        end = End(hang.rank, "hung", hang.headline)
        if not self._store_missed:
            end = process_groups.tell_end(end)
        if end.teller in (None, self._rank):
            write_status(self._trainer, "hung", rank=hang.rank, reason=hang.headline, exit_code=1)
        record_error(HangError(hang.headline))
        exit_at_once(1)

    def _finding(self, hang: Hang | None) -> str:
        """What is wrong now, or that nothing is any more, as it stands in the store; never the same text twice."""
        return json.dumps({"by": self._rank, "at": time.time(), "hang": None if hang is None else asdict(hang)})

    def _over(self) -> None:
        """The rank moves again."""
        if self._told:
            self._store.set(_FOUND, self._finding(None))
        self._goes_on()

    def _goes_on(self) -> None:
        self.hang = None
        if self._told:
            _say(f"samestep: the run goes on, at step {self._trainer.global_step}.")

    def _what_now(self, hang: Hang) -> str:
        if self._exits:
            return "hang_action='exit': the run ends now."
        if hang.certain:
            return f"No rank can come any more: the run ends in {self._limit:.0f} s."
        minutes = f"{self._strategy.allowed.total_seconds():.0f} s"
        return (
            f"The run waits on, and ends when a collective has taken {minutes} (the strategy's timeout). "
            "Trainer(hang_action='exit') ends it at once."
        )


def _key(rank: int) -> str:
    return f"beat_{rank}"


def _get(store: dist.Store, key: str) -> str:
    """The value of a key, without waiting for one that is not there."""
    return store.get(key).decode() if store.check([key]) else ""


def _say(text: str) -> None:
    bar = "\n" if sys.stderr.isatty() else ""  # a progress bar may hold the line
    # At once: print would write the end of the line by itself, behind what another thread writes.
    sys.stderr.write(f"{bar}{text}\n")
    sys.stderr.flush()
