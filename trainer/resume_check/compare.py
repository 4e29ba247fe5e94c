"""Two runs side by side: the first thing that differs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

Place = tuple[int, int, int, int]
"""Epoch, micro-batch, steps done; and 0 where the micro-batch begins, 1 at its end, 2 at that of its step: in order."""

_KINDS = {"begin": 0, "end": 1, "step": 2}


@dataclass(frozen=True)
class Difference:
    """The first thing that is not what it was in the uninterrupted run."""

    step: int
    """Optimizer steps done."""
    epoch: int
    batch_idx: int
    rank: int
    name: str
    """What differs."""
    detail: str
    """How."""
    others: int
    """How much else differs at this place."""
    resumed_at: int
    """The step that the run was resumed at."""


def read_notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank of a start has noted, in order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("rank-*.jsonl")):
        rank = int(file.stem.removeprefix("rank-"))
        found[rank] = [json.loads(line) for line in file.read_text("utf-8").splitlines(True) if line.endswith("\n")]
    return found


def first_difference(whole: Path, resumed: Path) -> Difference | None:
    """The first difference of a resumed start from the uninterrupted one, over all ranks."""
    expected, got = read_notes(whole), read_notes(resumed)
    found: list[tuple[Place, Difference]] = []
    for rank, notes in got.items():
        theirs = {_place(note): note["values"] for note in expected.get(rank, []) if note["kind"] in _KINDS}
        resumed_at = next((note["step"] for note in notes if note["kind"] == "start"), 0)
        places = [_place(note) for note in notes if note["kind"] in _KINDS]
        passed_over = [place for place in theirs if places and places[0] < place < places[-1] and place not in places]
        if passed_over:
            epoch, batch_idx, step, _ = place = min(passed_over)
            detail = "the resumed run did not come here"
            found.append((place, Difference(step, epoch, batch_idx, rank, "the place itself", detail, 0, resumed_at)))
        for note in notes:
            if note["kind"] not in _KINDS:
                continue
            place = _place(note)
            difference = _difference(theirs.get(place), note["values"])
            if difference is not None:
                name, others = difference
                detail = _detail(whole, resumed, rank, place, name, theirs.get(place), note["values"])
                epoch, batch_idx, step, _ = place
                found.append((place, Difference(step, epoch, batch_idx, rank, name, detail, others, resumed_at)))
                break
    return min(found, key=lambda each: (each[0], each[1].rank))[1] if found else None


def _place(note: dict[str, Any]) -> Place:
    epoch, batch_idx, step = note["place"]
    return epoch, batch_idx, step, _KINDS[note["kind"]]


def _difference(expected: dict[str, str] | None, got: dict[str, str]) -> tuple[str, int] | None:
    """The name of the first value that differs, and how many others do."""
    if expected is None:
        return "the place itself", 0
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return (names[0], len(names) - 1) if names else None


def _detail(
    whole: Path, resumed: Path, rank: int, place: Place, name: str, expected: dict[str, str] | None, got: dict[str, str]
) -> str:
    if expected is None:
        return "the uninterrupted run did not come here"
    for values, where in ((got, "resumed"), (expected, "uninterrupted")):
        if name not in values:
            return f"it is not there in the {where} run"
    if not _is_digest(got[name]):
        return f"{got[name]} instead of {expected[name]}"
    files = [folder / f"rank-{rank}-step-{place[2]}.pt" for folder in (whole, resumed)]
    if place[3] != _KINDS["step"] or not all(file.exists() for file in files):
        return "other bits"
    first, second = (cast("dict[str, Tensor]", torch.load(file, weights_only=True)).get(name) for file in files)
    if first is None or second is None:
        return "other bits"
    if first.shape != second.shape:
        return f"shape {list(second.shape)} instead of {list(first.shape)}"
    apart = (first.to(torch.complex128) - second.to(torch.complex128)).abs()
    return f"max abs {float(apart.max()):.2g}, in {int((apart > 0).sum())} of {first.numel()} numbers"


def _is_digest(text: str) -> bool:
    return len(text) == 16 and all(letter in "0123456789abcdef" for letter in text)
