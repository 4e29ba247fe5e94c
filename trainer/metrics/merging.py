"""What ranks had logged and counted in an epoch, as another number of ranks goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from .exchange import combined_states

NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""What changes no other value it is reduced with."""


def part_of(former_ranks: int, rank: int, ranks: int) -> range:
    """The former ranks whose sums go on as this rank's: each of them goes on as one."""
    return range(rank, former_ranks, ranks)


def merge(states: Sequence[Mapping[str, Any]], task: nn.Module) -> dict[str, Any]:
    """One rank's `metrics_state_dict` in place of several ranks'.

    Args:
        states: of the former ranks; at least one.
        task: holds the torchmetrics objects, which know how their sums are combined.
    """
    logs = [state["log"] for state in states]
    entries: dict[str, dict[str, Any]] = {}
    for entry in (entry for log in logs for entry in log["entries"]):
        known = entries.get(entry["name"])
        entries[entry["name"]] = entry if known is None else _both(known, entry)
    loaders = {loader for log in logs for loader in log["batches"]}
    counted = {loader: sum(log["batches"].get(loader, 0) for log in logs) for loader in loaders}
    paths = {path for state in states for path in state["objects"]}
    objects = {
        path: _merged_object(task.get_submodule(path), [s["objects"][path] for s in states if path in s["objects"]])
        for path in sorted(paths)
    }
    return {"log": {**logs[0], "entries": list(entries.values()), "batches": counted}, "objects": objects}


def nothing_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a rank that knows the names of `state`, and has logged and counted nothing."""
    log = deepcopy(dict(state["log"]))
    for entry in log["entries"]:
        entry["step"], entry["step_values"], entry["weight"] = -1, [], 0
        if entry["total"] is not None and entry["metric"] is None:
            entry["total"] = NEUTRAL[entry["reduction"]]
    return {"log": {**log, "batches": {}}, "objects": {}}


def unmergeable(states: Sequence[Mapping[str, Any]], task: nn.Module) -> list[str]:
    """The torchmetrics objects whose sums can't become one: they combine several ranks' in `compute` only."""
    paths = {path for state in states for path in state["objects"]}
    return sorted(path for path in paths if not _can_merge(task.get_submodule(path)))


def without(state: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The state without some torchmetrics objects."""
    return {**state, "objects": {path: kept for path, kept in state["objects"].items() if path not in paths}}


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    steps = [entry for entry in (one, other) if entry["step"] == max(one["step"], other["step"])]
    return {
        **one,
        "total": _total(one["reduction"], one["total"], other["total"]),
        "weight": one["weight"] + other["weight"],
        "step": steps[0]["step"],
        "step_values": [value for entry in steps for value in entry["step_values"]],
    }


def _total(reduction: str, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if reduction in ("mean", "sum"):
        return one + other
    choose = torch.minimum if reduction == "min" else torch.maximum  # NaN comes through
    return choose(*(torch.as_tensor(value, dtype=torch.float64) for value in (one, other)))


def _can_merge(metric: Any) -> bool:
    return all(
        isinstance(metric._defaults[name], list) or reduction is not None
        for name, reduction in metric._reductions.items()
    )


def _merged_object(metric: Any, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(states) == 1:  # also of those that can't be merged
        return states[0]
    sums = {
        name: combined_states(
            [cast("Tensor | list[Any]", state["sums"][name]) for state in states], default, metric._reductions[name]
        )
        for name, default in metric._defaults.items()
    }
    return {"updates": sum(state["updates"] for state in states), "sums": sums}
