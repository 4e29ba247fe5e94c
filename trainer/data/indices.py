"""Which samples of the dataset are in each batch, as the loader's sampler says."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, Sampler

from .loaders import PreparedLoader


class Recorded(Sampler[Any]):
    """A sampler that notes what it gives. Workers read ahead, so it is ahead of the batches, but in their order."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
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
        return list(cast("list[Any]", item)) if isinstance(item, (list, tuple)) else [item]


def recorded(prepared: PreparedLoader) -> tuple[PreparedLoader, Recorded | None]:
    """The loader with its sampler recorded; None where nobody knows the indices.

    That is where the loader is no DataLoader, its dataset is a stream, or it gives batches out of order.
    """
    loader = cast("Any", prepared.loader)
    is_loader = isinstance(prepared.loader, DataLoader)
    if not is_loader or isinstance(loader.dataset, IterableDataset) or not getattr(loader, "in_order", True):
        return prepared, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = Recorded(getattr(loader, name))
    copied = copy.copy(loader)  # DataLoader lets no attribute be set, and a constructor of a subclass may differ
    vars(copied).update({name: sampler, "_iterator": None})
    return replace(prepared, loader=copied), sampler
