"""Which samples of the dataset are in each batch, as the loader's sampler says."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, Sampler

from .prepared import PreparedLoader
from .samples import SeededSamples


class Recorded(Sampler[Any]):
    """A sampler that notes what it gives. Workers read ahead, so it is ahead of the batches, but in their order.

    Args:
        sampler: gives an index, or a list of them.
        of_batches: it gives lists.
        with_epoch: each index is a pair with the epoch before it.
    """

    def __init__(self, sampler: Iterable[Any], *, of_batches: bool, with_epoch: bool) -> None:
        self.sampler, self.of_batches, self.with_epoch = sampler, of_batches, with_epoch
        self.given: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.given.clear()
        for item in self.sampler:
            self.given.append(item)
            yield item

    def __len__(self) -> int:
        return len(self.sampler)  # pyright: ignore

    def next_batch(self) -> list[Any]:
        """The dataset's indices in the next batch that the loader gives."""
        item = self.given.popleft()
        indices = list(cast("list[Any]", item)) if self.of_batches else [item]
        return [index for _, index in indices] if self.with_epoch else indices


def recorded(prepared: PreparedLoader) -> tuple[PreparedLoader, Recorded | None]:
    """The loader with its sampler recorded; None where nobody knows the indices.

    That is where the loader is no DataLoader, its dataset is a stream, or it gives batches out of order.
    """
    loader = cast("Any", prepared.loader)
    is_loader = isinstance(prepared.loader, DataLoader)
    if not is_loader or isinstance(loader.dataset, IterableDataset) or not getattr(loader, "in_order", True):
        return prepared, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    with_epoch = isinstance(loader.dataset, SeededSamples)
    sampler = Recorded(getattr(loader, name), of_batches=name == "batch_sampler", with_epoch=with_epoch)
    copied = copy.copy(loader)  # DataLoader lets no attribute be set, and a constructor of a subclass may differ
    vars(copied).update({name: sampler, "_iterator": None})
    return replace(prepared, loader=copied), sampler
