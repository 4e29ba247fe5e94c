"""Which rank ended the run, and why: told in the store, where its peers look when they have lost it.

A rank that fails tells its end before it leaves. Its peers only see that their collectives fail: "Connection closed by
peer". They look up what was told, and say that instead. One that was killed tells nothing; then the ranks that still
speak name the silent ones.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

# Errors that only say that another rank has ended or did not come: ours, and those of gloo and NCCL in the backward.
_CONSEQUENCE = re.compile(
    r"could not finish the collective|Connection (closed|reset) by peer|Broken pipe|Timed out waiting \d+ ?ms"
    r"|Application timeout caused pair closure|remote process exited|communicator was aborted"
)
_TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms|Application timeout caused pair closure")
# Seconds that a rank that has lost its peers waits for word of why. They fail within milliseconds of each other.
_PATIENCE = 1.0
# The same for one that its launcher ends: that has seen a rank end, which had told by then what it had to tell.
_PATIENCE_IN_HASTE = 0.1
_FIRST, _LEFT = "first", "left"


class PeerError(RuntimeError):
    """Another rank ended the run; this one only noticed. The message names that rank and what it told."""

    is_known = False
    """Whether the launcher knows that a rank has ended, and ends this one."""


@dataclass(frozen=True)
class End:
    """How a rank ended the run."""

    rank: int
    status: str
    """As in status.json: `failed`, `preempted`, …"""
    reason: str
    """One line."""
    place: str = ""
    """What the rank was doing, as "training, epoch 0, step 7"."""
    exit_code: int = 1
    teller: int | None = None
    """The rank that told it: another one, where this rank could not; None: not told."""


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that another rank has ended, or did not come."""
    return isinstance(error, PeerError) or _CONSEQUENCE.search(text_of(error)) is not None


def is_of_worker(error: BaseException) -> bool:
    """Whether it says that a worker of one of this rank's loaders has died."""
    return re.search(r"DataLoader worker .* exited unexpectedly", text_of(error)) is not None


def text_of(error: BaseException) -> str:
    """`str(error)`, also of an exception whose own `__str__` fails."""
    try:
        return str(error)
    except Exception as another:
        return f"(its __str__ raised {type(another).__name__})"


def has_timed_out(error: BaseException) -> bool:
    """Whether it says that another rank did not come in time."""
    return _TIMED_OUT.search(text_of(error)) is not None


class FirstCause:
    """What the ranks of one run tell each other about its end.

    Args:
        store: of this run alone.
        departures: where ranks note that they have left the program; of the whole job.
        rank: this one.
        world_size: of the run.
    """

    def __init__(self, store: dist.Store, departures: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._departures, self._rank, self._world_size = store, departures, rank, world_size

    def tell(self, end: End) -> End:
        """Tell the peers how this rank ends the run; return the end that was told first, by whichever rank."""
        try:
            told = json.dumps(asdict(replace(end, teller=self._rank)))
            return _read(self._store.compare_set(_FIRST, "", told))
        except dist.DistError:
            return end  # whoever keeps the store has ended

    def of_peers(self, *, timed_out: bool, in_haste: Callable[[], bool]) -> End | None:
        """Why this rank's collectives fail: what was told first, or which ranks are silent; None: nobody knows.

        Args:
            timed_out: the connection is there, a rank did not come.
            in_haste: whether this rank is being ended by its launcher.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.set(_lost(self._rank), "")
            begun = time.monotonic()
            while not self._store.check([_FIRST]):
                patience = _PATIENCE_IN_HASTE if in_haste() else _PATIENCE
                if time.monotonic() - begun > patience or self._store.check([_lost(rank) for rank in others]):
                    break
                time.sleep(0.02)
            if self._store.check([_FIRST]):
                return _read(self._store.get(_FIRST))
            silent = [rank for rank in others if not self._store.check([_lost(rank)])]
            left = [rank for rank in silent if self._departures.check([f"{_LEFT}_{rank}"])]
        except dist.DistError:
            return None
        if left:
            return self.tell(End(left[0], "failed", "its program ended, while the other ranks went on", exit_code=0))
        if silent:
            ranks = ", ".join(map(str, silent))
            if timed_out:
                told = f"no word from rank {ranks}: stuck, or slower than the timeout of the strategy's collectives"
                return self.tell(End(silent[0], "hung", told))
            told = f"no word from rank {ranks}: killed, ended by os._exit, or stuck"
            return self.tell(End(silent[0], "failed", told))
        return None


def note_departure(departures: dist.Store, rank: int) -> None:
    """Tell the peers that this rank's program is at its end."""
    try:
        departures.set(f"{_LEFT}_{rank}", "")
        departures.compare_set(_LEFT, "", str(rank))
    except dist.DistError:
        pass  # so is whoever keeps the store


def first_departure(departures: dist.Store) -> int | None:
    """The rank whose program ended first; None: all are there still."""
    return int(departures.get(_LEFT)) if departures.check([_LEFT]) else None


def _lost(rank: int) -> str:
    return f"lost_{rank}"


def _read(told: bytes) -> End:
    return End(**json.loads(told.decode()))
