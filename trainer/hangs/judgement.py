"""From what each rank told about itself: whether some wait for one that does not come, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby


@dataclass(frozen=True)
class Beat:
    """What a rank tells about itself, about once a second. Times in seconds."""

    rank: int
    number: int
    """Counts them."""
    told: float
    """When, in UTC."""
    age: float
    """Since the rank moved: a counter, or what it does."""
    step: int
    where: str
    """What it does, and at which line of the user's code."""
    waits: str
    """The collective in which it waits; empty: it is elsewhere."""
    patience: float
    """The age from which on something is wrong, if others wait."""
    long: float
    """The age from which on it is worth a word that nothing moves, though no rank is missed."""
    begun: int | None = None
    """Collectives of the training group that it has begun, by torch's flight recorder; None: it can't say."""
    stack: tuple[str, ...] = ()
    """Where it is, once it has not moved for a while; the innermost call last."""
    silent: float = 0.0
    """Since the reader has heard something new."""


@dataclass(frozen=True)
class Hang:
    """Ranks that wait for others that do not come."""

    step: int
    headline: str
    """All of it in one sentence."""
    details: tuple[str, ...]
    """Stacks of those that have not come, and how many collectives each rank has begun."""
    certain: bool
    """No rank can come any more: all wait, at different places. Slow ones would not be in collectives."""
    rank: int
    """One that has not come; of ranks that wait for each other, the one that most others are not with."""

    def text(self) -> str:
        """Several lines."""
        return "\n".join([f"samestep: {self.headline}", *(f"  {line}" for line in self.details)])


def judge(beats: Sequence[Beat], silence: float) -> Hang | None:
    """Say who waits for whom, if something is wrong.

    Something is wrong where a rank waits for one that has no more patience coming to it; where all wait, but not in
    the same collective; and, much later, where nothing moves at all.

    Args:
        beats: of every rank.
        silence: seconds after which a rank whose watcher tells nothing new does not live, or can't run Python.
    """
    waiting = [beat for beat in beats if beat.waits and beat.silent < silence]
    absent = [beat for beat in beats if beat not in waiting]
    oldest = max((beat.age for beat in waiting), default=0.0)
    if waiting and absent:
        out_of_patience = any(beat.silent >= silence or beat.age >= beat.patience for beat in absent)
        if not out_of_patience or not any(beat.age >= beat.patience for beat in waiting):
            return None
        missing = "; ".join(_missing(group, silence) for group in _grouped(absent, silence))
        return _hang(oldest, waiting, f"{_waits(waiting)}; {missing}", absent, beats)
    places = _by_collective(waiting)
    if len(places) > 1:
        if not all(beat.age >= beat.patience for beat in waiting):
            return None
        each = ", ".join(f"{_ranks(group)} in {group[0].waits}{_at(group[0])}" for group in places)
        what = f"the ranks wait for each other at different places: {each}"
        return _hang(oldest, waiting, what, places[-1], beats, certain=True)
    if not all(beat.age >= beat.long for beat in beats):
        return None
    if places:
        what = f"all ranks wait in {waiting[0].waits}: the network is slow, or has lost a message"
        return _hang(oldest, beats, what, [], beats)
    each = "; ".join(f"{_ranks(group)} {_is(group)} in {group[0].where}" for group in _grouped(beats, silence))
    return _hang(min(beat.age for beat in beats), beats, f"no rank waits for another: {each}", beats[:1], beats)


def _hang(
    seconds: float,
    at: Sequence[Beat],
    what: str,
    absent: Sequence[Beat],
    beats: Sequence[Beat],
    *,
    certain: bool = False,
) -> Hang:
    details: list[str] = []
    for beat in {beat.stack: beat for beat in reversed(absent) if beat.stack}.values():
        details += [f"rank {beat.rank}, the innermost call last:", *(f"  {line}" for line in beat.stack)]
    begun = sorted((beat for beat in beats if beat.begun is not None), key=lambda beat: (-(beat.begun or 0), beat.rank))
    if len({beat.begun for beat in begun}) > 1:
        counts = [f"{_ranks(list(group))}: {number}" for number, group in groupby(begun, key=lambda beat: beat.begun)]
        details.append(f"collectives begun in the training group (flight recorder): {', '.join(counts)}")
    step = max(beat.step for beat in at)
    return Hang(
        step=step, headline=f"no progress for {seconds:.0f} s at step {step}: {what}", details=tuple(details),
        certain=certain, rank=(absent or beats)[0].rank,
    )  # fmt: skip


def _by_collective(waiting: Iterable[Beat]) -> list[list[Beat]]:
    """The ranks that wait in the same collective together, the most first."""
    places: dict[str, list[Beat]] = {}
    for beat in waiting:
        places.setdefault(beat.waits, []).append(beat)
    return sorted(places.values(), key=len, reverse=True)


def _waits(waiting: Sequence[Beat]) -> str:
    return ", ".join(f"{_ranks(group)} {_verb(group, 'wait')} in {group[0].waits}" for group in _by_collective(waiting))


def _grouped(absent: Iterable[Beat], silence: float) -> list[list[Beat]]:
    """Ranks that are at the same place together."""
    groups: dict[object, list[Beat]] = {}
    for beat in absent:
        groups.setdefault(beat.rank if beat.silent >= silence else beat.where, []).append(beat)
    return list(groups.values())


def _missing(group: list[Beat], silence: float) -> str:
    first = group[0]
    come = f"{_ranks(group)} {'have' if len(group) > 1 else 'has'} not come"
    if first.silent < silence:
        return f"{come}: {'they are' if len(group) > 1 else 'it is'} in {first.where}"
    if not first.number:
        return f"{come}: nothing was heard of its process in this run"
    since = datetime.fromtimestamp(first.told, timezone.utc).strftime("%H:%M:%S")
    return (
        f"{come}: its process has not answered since {since} UTC (stopped, swapped out, held up in native code, or its host "
        f"is gone); it was in {first.waits or first.where}"
    )


def _ranks(group: Sequence[Beat]) -> str:
    """ "rank 3", or "ranks 0, 2-7"."""
    numbers = sorted(beat.rank for beat in group)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else [str(number) for number in members]
    return f"ranks {', '.join(runs)}"


def _verb(group: Sequence[Beat], plural: str) -> str:
    return plural if len(group) > 1 else f"{plural}s"


def _is(group: Sequence[Beat]) -> str:
    return "are" if len(group) > 1 else "is"


def _at(beat: Beat) -> str:
    _, bracket, place = beat.where.partition(" (")
    return f"{bracket}{place}"
