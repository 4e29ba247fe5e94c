"""Several training loaders at once: `CombinedLoader`, and how a loop reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, cast

from .loaders import Dealing, limit_of, prepare_loader
from .prepared import PreparedLoader

CombinationMode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]


class CombinedLoader:
    """Several loaders for `fit`, read together: a batch holds one of each, in a dict or list as the loaders are.

    Args:
        iterables: a dict, list or tuple of loaders.
        mode: `min_size`: until the first ends; `max_size`: until the last ends, with None in the place of those that
            ended before; `max_size_cycle`: until the last ends, while the others begin anew as often as needed;
            `sequential`: one after the other, a batch is one of one loader.

    Raises:
        TypeError, ValueError: there are no loaders, or there is no such mode.
    """

    def __init__(self, iterables: Any, mode: CombinationMode = "min_size") -> None:
        if mode not in _LENGTHS:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, _LENGTHS))}.")
        if not isinstance(iterables, (Mapping, list, tuple)) or not iterables:
            kind = type(cast("Any", iterables)).__name__
            raise TypeError(f"CombinedLoader got a {kind}: expected a dict, list or tuple with one loader or more.")
        self.iterables, self.mode = cast("Any", iterables), mode

    @property
    def by_key(self) -> dict[Any, Any]:
        """The loaders by key, or by place."""
        if isinstance(self.iterables, Mapping):
            return dict(cast("Mapping[Any, Any]", self.iterables))
        return dict(enumerate(cast("list[Any]", self.iterables)))


# The length of a combination, from those of its parts.
_LENGTHS: dict[str, Callable[[list[int]], int]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}


@dataclass
class PreparedCombination(PreparedLoader):
    """Several prepared loaders, read together."""

    parts: list[PreparedLoader] = field(default_factory=list[PreparedLoader])
    mode: str = "min_size"
    build: Callable[[list[Any]], Any] = list
    """Makes a batch of one of each part."""
    _epoch: int = 0

    @property
    def order(self) -> str | None:
        """What puts the samples in order, of each part."""
        return f"{self.mode} of " + ", ".join(part.order or "a loader that is not dealt" for part in self.parts)

    def order_digest(self) -> str | None:
        """Of the parts' orders; None: no part has one to compare."""
        digests = [part.order_digest() for part in self.parts]
        return repr(digests) if any(digests) else None

    def remarks(self) -> list[str]:
        """What is to be known of each part."""
        return [f"loader {index}: {remark}" for index, part in enumerate(self.parts) for remark in part.remarks()]

    @property
    def _lengths(self) -> list[int] | None:
        """Of the parts; None where one has none."""
        lengths = [part.length_of_epoch() for part in self.parts]
        return None if None in lengths else cast("list[int]", lengths)

    def length_of_epoch(self) -> int | None:
        """Batches of this rank."""
        length = None if self._lengths is None else _LENGTHS[self.mode](self._lengths)
        return length if self.limit is None else self.limit if length is None else min(length, self.limit)

    def set_epoch(self, epoch: int) -> None:
        """Choose the orders of the epoch."""
        self._epoch = epoch
        self.length = self.length_of_epoch()

    def batches(self, skip: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, from the one behind the first `skip`.

        Where the lengths of all parts are known, those skipped are left to each part.
        """
        begin = 0 if self._lengths is None else skip
        read = {"sequential": self._one_by_one, "max_size_cycle": self._cycling}.get(self.mode, self._together)
        combined = read(begin)
        if skip > begin:
            combined = islice(combined, skip, None)
        return combined if self.length is None else islice(combined, self.length - skip)

    def _reader(self, part: PreparedLoader, number: int = 0, skip: int = 0) -> Iterator[Any]:
        """Begin to read a part for the n-th time in the epoch: each time is an epoch of its own for the part.

        So its order is another one each time, and still a function of where the run is.
        """
        lengths, own = self._lengths, part.length_of_epoch()
        times = -(-max(lengths) // own) if self.mode == "max_size_cycle" and lengths is not None and own else 1
        part.set_epoch(self._epoch * times + number)
        return part.batches(skip)

    def _together(self, begin: int) -> Iterator[Any]:
        lengths = self._lengths or [0] * len(self.parts)
        readers = [self._reader(part, skip=min(begin, own)) for part, own in zip(self.parts, lengths, strict=True)]
        return self._zipped(readers)

    def _zipped(self, readers: list[Iterator[Any]]) -> Iterator[Any]:
        nothing = object()
        while True:
            batch = [next(reader, nothing) for reader in readers]
            ended = [item is nothing for item in batch]
            if all(ended) or (self.mode == "min_size" and any(ended)):
                return
            yield self.build([None if item is nothing else item for item in batch])

    def _cycling(self, begin: int) -> Iterator[Any]:
        lengths = self._lengths
        places = [(0, 0)] * len(self.parts) if lengths is None else [divmod(begin, own) for own in lengths]
        readers = [self._reader(part, *place) for part, place in zip(self.parts, places, strict=True)]
        return self._repeated(readers, [number for number, _ in places])

    def _repeated(self, readers: list[Iterator[Any]], numbers: list[int]) -> Iterator[Any]:
        while True:
            batch: list[Any] = []
            for index, part in enumerate(self.parts):
                try:
                    item = next(readers[index])
                except StopIteration:
                    numbers[index] += 1
                    if all(numbers):  # each was read to its end once
                        return
                    readers[index] = self._reader(part, numbers[index])
                    item = next(readers[index])
                batch.append(item)
            yield self.build(batch)

    def _one_by_one(self, begin: int) -> Iterator[Any]:
        first = 0
        for own in (self._lengths or ())[:-1]:
            if begin < own:
                break
            begin, first = begin - own, first + 1
        return self._chained(self._reader(self.parts[first], skip=begin), first)

    def _chained(self, reader: Iterator[Any], first: int) -> Iterator[Any]:
        yield from reader
        for part in self.parts[first + 1 :]:
            yield from self._reader(part)


def prepare_combined(loader: CombinedLoader, name: str, limit: int | float, dealing: Dealing) -> PreparedCombination:
    """Deal the samples of each of several loaders to the ranks, and limit the batches of all together.

    Raises:
        TypeError, ValueError: one can't be iterated or dealt out, or has no batch.
    """
    keys = list(loader.by_key)
    parts = [prepare_loader(part, f"{name} ({key!r})", 1.0, dealing) for key, part in loader.by_key.items()]
    build: Callable[[list[Any]], Any] = list
    if isinstance(loader.iterables, Mapping):
        build = lambda batches: dict(zip(keys, batches, strict=True))  # noqa: E731
    elif isinstance(loader.iterables, tuple):
        build = tuple
    sizes = [part.batch_size for part in parts]
    sizes = sizes[:1] if loader.mode == "sequential" and len(set(sizes)) == 1 else sizes
    known = None not in sizes and (loader.mode != "sequential" or len(sizes) == 1)
    samples = [part.dataset_size for part in parts]
    combination = PreparedCombination(
        build([part.loader for part in parts]),
        None,
        None,
        sum(cast("list[int]", sizes)) if known else None,
        dataset_size=None if None in samples else sum(cast("list[int]", samples)),
        parts=parts,
        mode=loader.mode,
        build=build,
    )
    length = combination.length_of_epoch()
    combination.limit = limit_of(length, length, limit, name)
    combination.length = combination.length_of_epoch()
    return combination
