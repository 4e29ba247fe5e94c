"""What differs between two checkpoints: tensor by tensor, number by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .read import Checkpoint, read_checkpoint, read_rank_state


class Difference(NamedTuple):
    """One place in which two checkpoints differ."""

    where: str
    """The part (model, training, rank, manifest), and the place in it."""
    first: str
    """What the first one holds there."""
    second: str
    """What the second one holds there."""
    greatest: float | None = None
    """Of two tensors or numbers, the greatest absolute difference; inf where one of them is not finite."""


_NOTHING: Any = object()


def differences(first: Path, second: Path) -> list[Difference]:
    """Compare two checkpoints, to the bit: weights by name first, then everything that a resumed run would go on with.

    Raises:
        CheckpointError: one of them is damaged, or is none.
    """
    one, other = read_checkpoint(first), read_checkpoint(second)
    found = list(_compare("model", dict(sorted(one.model.items())), dict(sorted(other.model.items()))))
    found += _compare("training", one.training, other.training)
    for rank in range(max(_ranks(one), _ranks(other))):
        states = (read_rank_state(checkpoint, rank) for checkpoint in (one, other))
        mine, theirs = (_NOTHING if state is None else state for state in states)
        found += _compare(f"rank {rank}:", mine, theirs)
    found += _compare("manifest", _said(one), _said(other))
    return found


def _ranks(checkpoint: Checkpoint) -> int:
    return sum(name.startswith("rank-") for name in checkpoint.manifest["files"])


def _said(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest, without what differs between any two."""
    return {name: value for name, value in checkpoint.manifest.items() if name not in ("created", "files", "sha256")}


def _compare(where: str, first: Any, second: Any) -> Iterator[Difference]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        one, other = cast("Mapping[Any, Any]", first), cast("Mapping[Any, Any]", second)
        for key in dict.fromkeys((*one, *other)):
            yield from _compare(f"{where} {key}", one.get(key, _NOTHING), other.get(key, _NOTHING))
    elif isinstance(first, (list, tuple)) and type(first) is type(second) and len(first) == len(second):  # pyright: ignore
        if _is_long(first):  # random numbers: one place, not 625
            if first != second:
                yield Difference(where, "numbers", "other numbers")
            return
        for index, (mine, theirs) in enumerate(zip(first, second, strict=True)):  # pyright: ignore
            yield from _compare(f"{where} {index}", mine, theirs)
    elif not _same(first, second):
        yield Difference(where, _told(first), _told(second), _greatest(first, second))


def _is_long(values: Any) -> bool:
    return len(values) > 64 and all(type(value) in (int, float) for value in values)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return alike and torch.equal(_bits(first), _bits(second))
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (first != first and second != second)
    return type(first) is type(second) and bool(first == second)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's memory: NaN is equal to itself, 0 is not -0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _greatest(first: Any, second: Any) -> float | None:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or not first.numel():
            return None
        wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
        return float((first.to(wide) - second.to(wide)).abs().nan_to_num(nan=float("inf")).max())
    numbers = (int, float)
    if isinstance(first, numbers) and isinstance(second, numbers) and bool not in (type(first), type(second)):
        return abs(first - second)
    return None


def _told(value: Any) -> str:
    """In a few words."""
    if value is _NOTHING:
        return "(not there)"
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{value.item()!r}" if value.numel() == 1 else kind
    if isinstance(value, (Mapping, list, tuple)):
        return f"{type(value).__name__} of {len(value)}"  # pyright: ignore
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
