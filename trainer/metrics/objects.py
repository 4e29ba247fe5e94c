"""The torchmetrics objects of a task, as a checkpoint keeps them: what each rank has counted so far."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def metric_states(task: nn.Module) -> dict[str, dict[str, Any]]:
    """The state of each object that has counted something, by its path in the task: its number of updates, and its sums."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    for module in task.modules():
        if isinstance(module, torchmetrics.MetricCollection):
            # Those that count the same thing are updated as one; this gives each what it would have.
            cast("Any", module).items()
    return {
        path: {
            "updates": metric._update_count,
            "sums": {name: _copied(getattr(metric, name)) for name in metric._defaults},
        }
        for path, metric in _metrics(task, torchmetrics)
        if metric.update_called
    }


def load_metric_states(task: nn.Module, states: Mapping[str, Any]) -> None:
    """Bring the objects back to `metric_states`; those that are not in it have counted nothing."""
    torchmetrics = sys.modules.get("torchmetrics")
    for path, metric in _metrics(task, torchmetrics) if torchmetrics is not None else ():
        metric.reset()
        state = states.get(path)
        if state is None:
            continue
        for name, value in state["sums"].items():
            setattr(metric, name, _copied(value, metric.device))
        metric._update_count = state["updates"]


def reset_updated(task: nn.Module, held: Mapping[int, int]) -> None:
    """Reset the objects that have counted more than `held`, their numbers of updates by `id`."""
    torchmetrics = sys.modules.get("torchmetrics")
    for _, metric in _metrics(task, torchmetrics) if torchmetrics is not None else ():
        if metric.update_count != held.get(id(metric), 0):
            metric.reset()


def _metrics(task: nn.Module, torchmetrics: Any) -> Iterator[tuple[str, Any]]:
    named = cast("Iterator[tuple[str, nn.Module]]", task.named_modules())
    return ((path, module) for path, module in named if isinstance(module, torchmetrics.Metric))


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    return [_copied(item, device) for item in value]
