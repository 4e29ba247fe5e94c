"""Grouping micro-batches into the windows of optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple


class Window(NamedTuple):
    """The micro-batches of one optimizer step."""

    size: int
    """How many this rank has."""
    divisor: float
    """What each loss is divided by, so that the gradient is their mean over all ranks."""
    batches: Iterable[Any]
    counts: list[int] | None = None
    """How many each rank has, where that may differ."""


def windows(batches: Iterator[Any], size: int, length: int | None) -> Iterator[Window]:
    """Yield the window of each step: `size` micro-batches, fewer in the last one.

    A step must know its real size before its first backward, which is divided by it. Where the number of batches
    (`length`) is known, the micro-batches are read as the step goes; else a window is read ahead.
    """
    if size == 1:
        for batch in batches:
            # Past the named tuple's own constructor, which costs as much as a small part of a step.
            yield tuple.__new__(Window, (1, 1, (batch,), None))
    elif length is not None:
        for start in range(0, length, size):
            count = min(size, length - start)
            yield Window(count, count, _exactly(count, batches))
        next(batches, None)  # a loader with a state of its own wants to see its end
    else:
        while window := list(islice(batches, size)):
            yield Window(len(window), len(window), window)


def _exactly(count: int, batches: Iterator[Any]) -> Iterator[Any]:
    for given in range(count):
        try:
            yield next(batches)
        except StopIteration:
            # The window's first losses were divided by `count`: the step would be a wrong one.
            raise RuntimeError(
                f"the training loader ended inside an accumulation window, {count - given} batches before the end "
                "that its length promised: expected len(loader) batches."
            ) from None
