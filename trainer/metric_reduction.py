"""Reducing many named values over the ranks in one collective, paired by name.

Every rank sends one frame of a fixed size: a digest of its names, and the first values. Equal digests mean that
the frames line up, whatever the order of the calls was; different ones are an error that names key and rank,
raised on every rank alike. Values are float64, and are combined in the order of the ranks: the result is the
same, bit by bit, on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..strategies.base import Strategy

# Numbers in the first frame: a header of HEADER, then two for each name.
FRAME = 64
HEADER = 3

_METRIC = "torchmetrics object "


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
        return value / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Agreed:
    """What all ranks log: reductions by name, each rank's numbers, and where torchmetrics objects are."""

    reductions: dict[str, str]
    numbers: list[list[float]]
    """For each rank that takes part: value and weight of each name, in the order of `reductions`."""
    metric_paths: dict[str, str]
    flags: dict[str, Any]


def agree_on_names(
    strategy: Strategy,
    rows: Mapping[str, Row],
    metric_paths: Mapping[str, str],
    flags: Mapping[str, Any],
    batches: int,
    when: str,
) -> Agreed:
    """Exchange the rows of all ranks.

    Args:
        strategy: carries the frames.
        rows: this rank's values.
        metric_paths: this rank's torchmetrics objects, by name: their paths in the task.
        flags: of each name; handed to ranks that know none.
        batches: how many this rank has seen. With none it takes the others' names, and adds nothing.
        when: "step" or "epoch", for the message.

    Raises:
        RuntimeError: on every rank, where a name is missing on one that had batches.
    """
    names = sorted(rows)
    schema = [(name, rows[name].reduction) for name in names]
    schema += [(name, _METRIC + path) for name, path in sorted(metric_paths.items())]
    numbers = _numbers(rows, names, strategy.device) if names else torch.empty(0, dtype=torch.float64)
    reductions = {name: rows[name].reduction for name in names}
    if strategy.world_size == 1:
        return Agreed(reductions, [numbers.tolist()], dict(metric_paths), {})
    digest = int.from_bytes(hashlib.sha256(repr(schema).encode()).digest()[:6], "big")  # exact in a float64
    frame = torch.zeros(FRAME, dtype=torch.float64, device=strategy.device)
    frame[:HEADER] = torch.tensor([digest, len(names), batches], dtype=torch.float64)
    first = numbers[: FRAME - HEADER]
    frame[HEADER : HEADER + len(first)] = first
    frames = strategy.all_gather(frame, name=f"metrics of the {when}").cpu()
    if (frames[:, 0] != digest).any():
        schemas = strategy.gather_objects((schema, bool(batches), dict(flags)), name=f"metric names of the {when}")
        schema, flags = _common_schema(schemas, when)  # raises, unless the ranks that differ had no batch
        reductions = {name: kind for name, kind in schema if not kind.startswith(_METRIC)}
        metric_paths = {name: kind.removeprefix(_METRIC) for name, kind in schema if kind.startswith(_METRIC)}
    count = 2 * len(reductions)
    takes_part = [any(row) for row in cast("list[list[float]]", frames[:, 1:HEADER].tolist())]
    gathered = frames[:, HEADER:]
    if count > FRAME - HEADER:
        rest = torch.zeros(count - (FRAME - HEADER), dtype=torch.float64, device=strategy.device)
        tail = numbers[FRAME - HEADER :]
        rest[: len(tail)] = tail
        gathered = torch.cat([gathered, strategy.all_gather(rest, name=f"more metrics of the {when}").cpu()], dim=1)
    rank_numbers = cast("list[list[float]]", gathered.tolist())
    kept = [row[:count] for row, part in zip(rank_numbers, takes_part, strict=True) if part]
    return Agreed(reductions, kept, dict(metric_paths), dict(flags))


def reduce_rows(agreed: Agreed) -> dict[str, float]:
    """Combine the ranks' numbers: Σ value / Σ weight for `mean`, else the sum, minimum or maximum."""
    result: dict[str, float] = {}
    for index, (name, reduction) in enumerate(agreed.reductions.items()):
        values = [row[2 * index] for row in agreed.numbers]
        if reduction == "mean":
            weight = sum(row[2 * index + 1] for row in agreed.numbers)
            result[name] = sum(values) / weight if weight else float("nan")
        elif reduction == "sum":
            result[name] = sum(values)
        else:
            # torch's, since Python's min and max pass over NaN or not by the order of the values.
            stacked = torch.tensor(values, dtype=torch.float64)
            result[name] = float(stacked.amin() if reduction == "min" else stacked.amax())
    return result


def _numbers(rows: Mapping[str, Row], names: list[str], device: torch.device) -> Tensor:
    """Value and weight of each row, in one float64 tensor: a single sync when it is read."""
    if not any(isinstance(rows[name].value, Tensor) for name in names):
        flat = [number for name in names for number in (float(rows[name].value), rows[name].weight)]
        return torch.tensor(flat, dtype=torch.float64, device=device)
    values = torch.stack([torch.as_tensor(rows[name].value, dtype=torch.float64, device=device) for name in names])
    weights = torch.tensor([rows[name].weight for name in names], dtype=torch.float64, device=device)
    return torch.stack([values, weights], dim=1).reshape(-1)


def _common_schema(schemas: list[tuple[list[tuple[str, str]], bool, dict[str, Any]]], when: str) -> Any:
    """The schema of the ranks that had batches, and its flags.

    Raises:
        RuntimeError: two of them differ.
    """
    active = [
        (rank, schema, flags) for rank, (schema, had_batches, flags) in enumerate(schemas) if had_batches or schema
    ]
    first_rank, first, flags = active[0]
    for rank, schema, _ in active[1:]:
        mine, theirs = dict(first), dict(schema)
        for name in sorted(set(mine) | set(theirs)):
            if name not in theirs:
                _missing(name, rank, first_rank, when)
            if name not in mine:
                _missing(name, first_rank, rank, when)
            if mine[name] != theirs[name]:
                raise RuntimeError(
                    f"metric {name!r} is reduced by {theirs[name]!r} on rank {rank}, and by {mine[name]!r} on rank "
                    f"{first_rank}: expected the same self.log on every rank."
                )
    return first, flags


def _missing(name: str, rank: int, other: int, when: str) -> None:
    raise RuntimeError(
        f"metric {name!r} was not logged on rank {rank} in this {when}, but on rank {other}: expected the same names on "
        "every rank. Log it on every rank, or say that it is local: self.log(…, sync_dist=False)."
    )
