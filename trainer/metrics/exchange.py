"""The states of torchmetrics objects over the ranks: one message for all of them, combined as each says itself.

torchmetrics' own exchange takes a barrier and two collectives for each state. It never returns where the ranks hold
lists of different lengths that are not concatenated (those of retrieval metrics), and fails where a rank holds none of a
list of integers.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...strategies.base import Strategy
from ..data.transfer import move_to_device


def is_torchmetric(value: Any) -> bool:
    """Whether it is a `torchmetrics.Metric`, which can only come from a program that imported torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def updates_of(task: nn.Module) -> dict[int, int]:
    """How often each of the task's torchmetrics objects that hold samples was updated, by their `id`.

    (Their hash changes with their samples, and `==` makes a new metric.)
    """
    metrics: list[Any] = [module for module in task.modules() if is_torchmetric(module)]
    return {id(metric): metric.update_count for metric in metrics if metric.update_called}


@contextmanager
def states_of_all_ranks(strategy: Strategy, metrics: Sequence[Any]) -> Generator[None]:
    """Inside, the metrics hold the samples of all ranks, and compute without communication; afterwards this rank's.

    Lists come in the order in which the batches were dealt. Metrics that bring an exchange of their own (another
    `dist_sync_fn` or `process_group`, or a class that overrides it) are left to it.

    Args:
        strategy: carries the states, on the CPU.
        metrics: the same on every rank, in the same order.
    """
    parts = list({id(part): part for metric in metrics for part in metric.modules() if _is_ours(part)}.values())
    if strategy.world_size == 1 or not parts:
        yield
        return
    own = [{name: getattr(part, name) for name in part._reductions} for part in parts]
    every = strategy.gather_objects(move_to_device(_copied(own), torch.device("cpu")), name="states of torchmetrics")
    availability = [part.distributed_available_fn for part in parts]
    try:
        for index, part in enumerate(parts):
            part.distributed_available_fn = _alone
            for name, reduction in part._reductions.items():
                combined = combined_states([theirs[index][name] for theirs in every], part._defaults[name], reduction)
                device = torch.device("cpu") if part.compute_on_cpu and isinstance(combined, list) else part.device
                setattr(part, name, move_to_device(combined, device))
        yield
    finally:
        for part, states, available in zip(parts, own, availability, strict=True):
            part.distributed_available_fn = available
            for name, state in states.items():
                setattr(part, name, state)


def _is_ours(part: Any) -> bool:
    base = sys.modules["torchmetrics"].Metric
    return (
        is_torchmetric(part)
        and type(part)._sync_dist is base._sync_dist
        and part.dist_sync_fn is None
        and part.process_group is None
        and part.sync_on_compute
    )


def _alone() -> bool:
    return False


def combined_states(states: list[Any], default: Any, reduction: Any) -> Any:
    """One state of all ranks: as torchmetrics combines it, but a list to concatenate stays one, as on one process."""
    if not isinstance(default, list):
        stacked = torch.stack(states)
        return stacked if reduction is None else reduction(stacked)
    lists = [cast("list[Any]", state) if isinstance(state, list) else [state] for state in states]
    nothing = object()
    items = [item for item in chain.from_iterable(zip_longest(*lists, fillvalue=nothing)) if item is not nothing]
    concatenate = sys.modules["torchmetrics"].utilities.dim_zero_cat
    return items if reduction in (None, concatenate) or not items else reduction(items)


def _copied(states: Any) -> Any:
    if isinstance(states, Tensor):
        return states.detach().clone()  # of a view all that is behind it would be sent
    if isinstance(states, dict):
        return {name: _copied(state) for name, state in cast("dict[str, Any]", states).items()}
    return [_copied(state) for state in cast("list[Any]", states)] if isinstance(states, list) else states
