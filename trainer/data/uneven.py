"""Loaders that end at different times on different ranks: in each step all ranks agree on who still has data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from ...strategies.base import Pending, Strategy
from .windows import Window, windows


def uneven_windows(batches: Iterator[Any], size: int, strategy: Strategy, *, join: bool) -> Iterator[Window]:
    """Yield the windows of an epoch, as many on every rank; a rank without data gets an empty one.

    While a step runs, each rank reads its next window ahead and says how many micro-batches are in it: one small
    collective that nobody waits for.

    Args:
        batches: of this rank.
        size: micro-batches of a window.
        strategy: carries the counts; its `uneven_divisor` says whose mean the gradient is.
        join: go on until no rank has data; False: until the first has none.
    """
    own = windows(batches, size, None)
    window, told = _announce(own, strategy)
    try:
        while True:
            counts = cast("list[int]", told.wait().tolist())
            if not any(counts) or not (join or all(counts)):
                return
            if not join:  # no further than the shortest: a step may hold collectives (SyncBatchNorm)
                counts = [min(counts)] * len(counts)
                window = window._replace(size=counts[0], batches=list(window.batches)[: counts[0]])
            present = max(counts) * strategy.world_size if strategy.uneven_divisor == "initial" else sum(counts)
            now = window._replace(divisor=present / strategy.world_size, counts=counts)
            window, told = _announce(own, strategy)
            yield now
    finally:
        told.wait()  # a run that stops early leaves no collective behind


def _announce(own: Iterator[Window], strategy: Strategy) -> tuple[Window, Pending]:
    window = next(own, Window(0, 1, ()))
    counts = torch.zeros(strategy.world_size, dtype=torch.int64)
    counts[strategy.rank] = window.size
    return window, strategy.start_all_reduce_max(counts, name="micro-batches of the next step", each_step=True)
