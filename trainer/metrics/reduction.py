"""Reducing many named values over the ranks in one collective, paired by name.

Every rank sends one frame of a fixed size: a digest of its names, and the first values. Equal digests mean that
the frames line up, whatever the order of the calls was; different ones are an error that names key and rank,
raised on every rank alike. Values are float64, and are combined in the order of the ranks: the result is the
same, bit by bit, on all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...strategies.base import Strategy

# Numbers in the frame: the digest, then two for each name.
HEADER = 1
FRAME = HEADER + 2 * 31
METRIC = "torchmetrics object "
LAST_STEP = -2
"""In place of a loader, for the newest step value at an epoch's end: of the ranks that had data in the last step."""


@dataclass(frozen=True)
class Row:
    """A value to reduce. For `mean`, `value` is the weighted sum."""

    reduction: str
    value: Tensor | float
    weight: float

    def local_value(self) -> float:
        """The value of this rank alone."""
        value = float(self.value)
        if self.reduction != "mean":
            return value
        return value / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Name:
    """What ranks must agree on: a name, how it is reduced, and where it is logged."""

    name: str
    reduction: str
    """`mean`, `sum`, `min` or `max`; or METRIC and a path in the task."""
    loader: int
    """The loader whose batches log it; −1: none, it is logged between batches; or LAST_STEP."""
    updated: bool = True
    """Of a torchmetrics object: whether this rank gave it anything."""

    @property
    def metric_path(self) -> str | None:
        """The path of the torchmetrics object in the task."""
        return self.reduction.removeprefix(METRIC) if self.reduction.startswith(METRIC) else None


@dataclass(frozen=True)
class Agreed:
    """What all ranks log."""

    names: list[Name]
    numbers: dict[str, list[list[float]]]
    """For each name that is no torchmetrics object, `[value, weight]` of each rank that logged it."""
    flags: dict[str, Any]
    """The arguments of `self.log` by name, from a rank that had batches; empty where all ranks log the same."""


def agree_on_names(
    strategy: Strategy,
    names: list[Name],
    rows: Mapping[str, Row],
    flags: Mapping[str, Any],
    batches: Mapping[int, int],
    when: str,
) -> Agreed:
    """Exchange the rows of all ranks.

    Args:
        strategy: carries the frames.
        names: what this rank logs, sorted by name.
        rows: its values, for those that are no torchmetrics objects.
        flags: the arguments of each `self.log`; handed to ranks that know none.
        batches: how many this rank has seen of each loader. A rank without any takes the others' names.
        when: "step" or "epoch", for the message.

    Raises:
        RuntimeError: on every rank, where a name is missing on one that had batches of the loader.
    """
    valued = [name.name for name in names if name.metric_path is None]
    numbers = _numbers(rows, valued, strategy.device)
    if strategy.world_size == 1:
        return Agreed(names, {name: [pair] for name, pair in zip(valued, _pairs(numbers), strict=True)}, {})
    digest = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:6], "big")  # exact in a float64
    frame = torch.zeros(FRAME, dtype=torch.float64, device=strategy.device)
    first = numbers[: FRAME - HEADER]
    frame[0] = digest
    frame[HEADER : HEADER + len(first)] = first
    frames = strategy.all_gather(frame, name=f"metrics of the {when}").cpu()
    if (frames[:, 0] != digest).any():  # the same on every rank: one of them differs from another
        mine = (names, dict(zip(valued, _pairs(numbers), strict=True)), dict(batches), dict(flags))
        return _common(strategy.gather_objects(mine, name=f"names of the {when}"), when)
    gathered = frames[:, HEADER : HEADER + len(first)]
    if len(numbers) > len(first):
        tails = strategy.all_gather(numbers[len(first) :].contiguous(), name=f"more metrics of the {when}").cpu()
        gathered = torch.cat([gathered, tails], dim=1)
    ranks = [_pairs(row) for row in gathered]
    return Agreed(names, {name: [pairs[index] for pairs in ranks] for index, name in enumerate(valued)}, {})


def reduce_rows(agreed: Agreed) -> dict[str, float]:
    """Combine the ranks' numbers: Σ value / Σ weight for `mean`, else the sum, minimum or maximum."""
    result: dict[str, float] = {}
    for name in agreed.names:
        if name.metric_path is not None:
            continue
        pairs = agreed.numbers[name.name]
        values = [value for value, _ in pairs]
        if name.reduction == "mean":
            weight = sum(weight for _, weight in pairs)
            result[name.name] = sum(values) / weight if weight else math.nan
        elif name.reduction == "sum":
            result[name.name] = sum(values)
        else:
            # torch's, since Python's min and max pass over NaN or not by the order of the values.
            stacked = torch.tensor(values, dtype=torch.float64)
            result[name.name] = float(stacked.amin() if name.reduction == "min" else stacked.amax())
    return result


def _numbers(rows: Mapping[str, Row], names: list[str], device: torch.device) -> Tensor:
    """Value and weight of each row, in one float64 tensor: a single sync when it is read."""
    if not any(isinstance(rows[name].value, Tensor) for name in names):
        flat = [number for name in names for number in (float(rows[name].value), rows[name].weight)]
        return torch.tensor(flat, dtype=torch.float64, device=device)
    values = torch.stack([torch.as_tensor(rows[name].value, dtype=torch.float64, device=device) for name in names])
    weights = torch.tensor([rows[name].weight for name in names], dtype=torch.float64, device=device)
    return torch.stack([values, weights], dim=1).reshape(-1)


def _pairs(numbers: Tensor) -> list[list[float]]:
    return cast("list[list[float]]", numbers.reshape(-1, 2).tolist())


Told = tuple[list[Name], dict[str, list[float]], dict[int, int], dict[str, Any]]


def _common(told: list[Told], when: str) -> Agreed:
    """The names of all ranks, where those that differ had no batch that would log them.

    Raises:
        RuntimeError: a rank had batches and did not log, or logged otherwise.
    """
    names: dict[str, Name] = {}
    first_rank: dict[str, int] = {}
    flags: dict[str, Any] = {}
    for rank, (theirs, _, _, their_flags) in enumerate(told):
        for name in theirs:
            known = names.setdefault(name.name, name)
            first = first_rank.setdefault(name.name, rank)
            flags.setdefault(name.name, their_flags.get(name.name))
            if known.reduction != name.reduction:
                raise RuntimeError(
                    f"metric {name.name!r} is reduced by {name.reduction!r} on rank {rank}, and by {known.reduction!r} on "
                    f"rank {first}: expected the same self.log on every rank."
                )
    for rank, (theirs, _, batches, _) in enumerate(told):
        missing = names.keys() - {name.name for name in theirs}
        for name in sorted(missing):
            loader = names[name].loader
            had_batches = any(batches.values()) if loader == -1 else batches.get(loader, 0)
            if had_batches:
                raise RuntimeError(
                    f"metric {name!r} was not logged on rank {rank} in this {when}, but on rank {first_rank[name]}: expected "
                    "the same names on every rank. Log it on every rank, or say that it is local: "
                    "self.log(…, sync_dist=False)."
                )
    numbers = {
        name: [pairs[name] for _, pairs, _, _ in told if name in pairs]
        for name in names
        if names[name].metric_path is None
    }
    return Agreed([names[name] for name in sorted(names)], numbers, flags)
