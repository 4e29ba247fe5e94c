"""Who sees which sample: one global order, a function of seed and epoch, dealt to the ranks in turn.

Rank r of W takes places r, r+W, r+2W, … of the order. So W ranks × batch B see in each step the very samples that
1 rank × batch W·B sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized, ValuesView
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..randomness import RandomStream, derived_seed, seeded_rng

COMPARED = 1000
"""The first items of an order that ranks compare."""


class ShuffledOrder(Sampler[int]):
    """A permutation of 0 … length−1 that depends on seed and epoch only."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, self.epoch, "order"))
        order = cast("list[int]", torch.randperm(self.length, generator=generator).tolist())
        return iter(order)  # not a generator of ours, which would cost a call for each sample


class SeededOrder(Sampler[Any]):
    """A user's sampler, drawn from random numbers that depend on seed and epoch only: equal on all ranks.

    Without it, each rank's sampler would draw its own order, and some samples would be seen twice, some never.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed, 0
        self._drawn: tuple[int, Iterator[Any]] | None = None  # by `digest`, for the next iteration of this epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the random numbers."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore

    def digest(self) -> str:
        """Of the order's first items, for ranks to compare. The next iteration gives these: nothing is drawn twice."""
        items = self._draw()
        first = list(islice(items, COMPARED))
        self._drawn = self.epoch, chain(first, items)
        return hashlib.sha256(repr(_plain(first)).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Any]:
        drawn, self._drawn = self._drawn, None
        return drawn[1] if drawn is not None and drawn[0] == self.epoch else self._draw()

    def _draw(self) -> Iterator[Any]:
        seed = derived_seed(self.seed, self.epoch, "sampler")
        for generator in generators_of(self.sampler):
            generator.manual_seed(seed)
        if has_length(self.sampler):
            with seeded_rng(seed):
                return iter(list(self.sampler))
        return _drawn_apart(self.sampler, seed)


def check_same_order(orders: Sequence[str | None], name: str) -> None:
    """Refuse user samplers that give each rank another order, of which some samples would be seen twice, some never.

    Args:
        orders: for each rank, `PreparedLoader.order_digest`.
        name: of the loader.

    Raises:
        RuntimeError: on every rank, with the ranks that differ from rank 0.
    """
    others = [str(rank) for rank, order in enumerate(orders) if order != orders[0]]
    if others:
        raise RuntimeError(
            f"the {name} loader's sampler gives other samples, or another order, on rank{'s' * (len(others) > 1)} "
            f"{', '.join(others)} than on rank 0: expected one order on all ranks, from which each is dealt its share. Draw "
            "it from torch's, numpy's or Python's global random numbers or from a torch.Generator in its attribute "
            "`generator`, which the trainer seeds; or from a generator of its own that is seeded in set_epoch(epoch)."
        )


def _plain(item: Any) -> Any:
    """An item of an order with a text that is the same in every process."""
    if isinstance(item, (Tensor, np.ndarray, np.generic)):
        return cast("Any", item).tolist()
    if isinstance(item, (list, tuple)):
        return [_plain(each) for each in cast("Sequence[Any]", item)]
    return item if isinstance(item, (int, float, str, bytes)) else type(item).__name__


def _drawn_apart(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """The sampler's items, drawn one by one from a stream of random numbers of their own: it may never end."""
    numbers = RandomStream(seed)
    with numbers:
        items = iter(sampler)
    while True:
        with numbers:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class Shard(Sampler[Any]):
    """This rank's part of an order of samples, or of batches.

    Args:
        order: the global order, equal on all ranks.
        rank: whose part.
        world_size: how many parts.
        even: True (training): leave out the last len(order) mod world_size items, so that all ranks have equally
            many. False (evaluation): every item goes to exactly one rank; some ranks may have one less, or none.
    """

    def __init__(self, order: Iterable[Any], rank: int, world_size: int, *, even: bool) -> None:
        self.order, self.rank, self.world_size, self.even = order, rank, world_size, even
        self.start = 0
        """Items of the global order behind which an iteration begins, and the dealing with it."""

    @property
    def dropped(self) -> int:
        """Items that no rank sees in a whole epoch."""
        return len(self.order) % self.world_size if self.even and has_length(self.order) else 0  # pyright: ignore

    def __len__(self) -> int:
        """Items of this rank in a whole epoch."""
        return self.left_from(0)

    def left_from(self, start: int) -> int:
        """Items of this rank behind the first `start` of the order."""
        left = max(0, len(self.order) - start)  # pyright: ignore
        return left // self.world_size if self.even else len(range(self.rank, left, self.world_size))

    def __iter__(self) -> Iterator[Any]:
        stop = None
        if self.even and has_length(self.order):
            stop = self.start + self.left_from(self.start) * self.world_size
        first = self.start + self.rank
        if isinstance(self.order, range):
            return iter(self.order[first : stop : self.world_size])
        return islice(self.order, first, stop, self.world_size)


class WithEpoch(Sampler[Any]):
    """A sampler whose items carry the epoch: `(epoch, index)`, in lists where it gives lists. See `SeededSamples`."""

    def __init__(self, sampler: Iterable[Any], *, of_batches: bool) -> None:
        self.sampler, self.of_batches, self.epoch = sampler, of_batches, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that items carry."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        if self.of_batches:
            return ([(epoch, index) for index in batch] for batch in self.sampler)
        return ((epoch, index) for index in self.sampler)


def has_length(items: Any) -> bool:
    """Whether `len(items)` works. (A class may have `__len__` and raise in it, as DataLoader does.)"""
    if not isinstance(items, Sized):
        return False
    try:
        len(items)
    except (TypeError, NotImplementedError):
        return False
    return True


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The random generators of a sampler and of those nested in it."""
    found: list[torch.Generator] = []
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            found.append(generator)
        sampler = getattr(sampler, "sampler", None)
    return found


def set_epoch(holder: Any, epoch: int) -> None:
    """Tell the epoch to a loader's samplers and its dataset, and to those nested in them, however deeply."""
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if item is None or id(item) in seen:
            return
        seen.add(id(item))
        if callable(getattr(item, "set_epoch", None)):
            item.set_epoch(epoch)
        for name in ("sampler", "batch_sampler", "order", "dataset"):
            visit(getattr(item, name, None))
        for each in _several(getattr(item, "samplers", None)) + _several(getattr(item, "datasets", None)):
            visit(each)

    visit(holder)


def _several(items: Any) -> list[Any]:
    """The members of a sampler over samplers, or of a dataset over datasets (`ConcatDataset`)."""
    if isinstance(items, Mapping):
        items = cast("Mapping[Any, Any]", items).values()
    return list(cast("Iterable[Any]", items)) if isinstance(items, (list, tuple, ValuesView)) else []
