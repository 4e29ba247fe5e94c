"""Reading what `configure_optimizers` returns, and when each LR scheduler steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, cast

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .hooks import overrides
from .task import Task

INTERVALS = ("epoch", "step", "validation")


@dataclass
class SchedulerConfig:
    """An LR scheduler and when it steps. Field names are the keys of the dict in `configure_optimizers`."""

    scheduler: LRScheduler
    """The scheduler; also any object with `step` and `state_dict` of its own."""

    interval: str = "epoch"
    """`epoch`: at the end of an epoch; `step`: after an optimizer step; `validation`: after a validation."""

    frequency: int = 1
    """Step at every n-th such moment."""

    monitor: str | None = None
    """The logged metric that a `ReduceLROnPlateau` is given, reduced over the ranks, when there is a new value."""

    strict: bool = True
    """Raise where the monitored metric is not there; False: leave the learning rate as it is."""

    name: str | None = None
    """Its name in `LearningRateMonitor`."""

    reduce_on_plateau: bool = False
    """Give its step the monitored metric, as that of a `ReduceLROnPlateau`: for a class of one's own."""

    @property
    def needs_metric(self) -> bool:
        """Whether its step takes a metric. (A plateau scheduler is an `LRScheduler`, too.)"""
        return self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)


def configure_optimizers(task: Task) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Call the task's `configure_optimizers`, and bring what it returns to one form.

    Raises:
        TypeError, ValueError: it returned none of the known forms, a scheduler's dict is wrong, or the
            optimizers can't be stepped automatically. The message says what to return instead.
    """
    returned = task.configure_optimizers()
    optimizers, schedulers = _split(returned)
    if not optimizers:
        raise TypeError(
            f"{type(task).__name__}.configure_optimizers returned {_kind(returned)}: expected an optimizer, a list of "
            'them, ([optimizers], [schedulers]), or {"optimizer": …, "lr_scheduler": …}.'
        )
    own = {id(parameter) for parameter in task.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"configure_optimizers: the {type(optimizer).__name__} holds no parameter of {type(task).__name__}, so nothing "
                "would be trained: expected self.parameters(), or a part of them."
            )
    configs = [_scheduler_config(item, optimizers) for item in schedulers]
    if task.automatic_optimization:
        _check_automatic(task, optimizers, configs)
    return optimizers, configs


def _split(returned: Any) -> tuple[list[Optimizer], list[Any]]:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _from_dict(cast("Mapping[str, Any]", returned))
    if not isinstance(returned, (list, tuple)):
        return [], []
    items = cast("Sequence[Any]", returned)
    if len(items) == 2 and isinstance(items[0], (list, tuple)):
        optimizers, schedulers = cast("Sequence[Any]", items[0]), items[1]
        schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]  # pyright: ignore
        if all(isinstance(item, Optimizer) for item in optimizers):
            return list(optimizers), cast("list[Any]", schedulers)
        return [], []
    if items and all(isinstance(item, Optimizer) for item in items):
        return list(items), []
    if items and all(isinstance(item, Mapping) for item in items):
        pairs = [_from_dict(item) for item in items]
        return [o for pair in pairs for o in pair[0]], [s for pair in pairs for s in pair[1]]
    return [], []


def _from_dict(given: Mapping[str, Any]) -> tuple[list[Optimizer], list[Any]]:
    for key in given:
        if key not in ("optimizer", "lr_scheduler", "monitor"):
            raise ValueError(
                f"configure_optimizers: unknown key {key!r} beside 'optimizer' and 'lr_scheduler'"
                f"{_nearest(key, ('optimizer', 'lr_scheduler', 'monitor'))}."
            )
    optimizer, scheduler = given.get("optimizer"), given.get("lr_scheduler")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"configure_optimizers: 'optimizer' is {_kind(optimizer)}, expected a torch optimizer.")
    if scheduler is None:
        return [optimizer], []
    if "monitor" in given:  # Lightning's short form: beside the scheduler, not in its dict
        inner = (
            dict(cast("Mapping[str, Any]", scheduler)) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        )
        scheduler = {"monitor": given["monitor"], **inner}
    return [optimizer], [scheduler]


def _scheduler_config(given: Any, optimizers: list[Optimizer]) -> SchedulerConfig:
    keys = tuple(field.name for field in fields(SchedulerConfig))
    if isinstance(given, Mapping):
        options = dict(cast("Mapping[str, Any]", given))
        for key in options:
            if key not in keys:
                raise ValueError(f"configure_optimizers: a scheduler has no key {key!r}{_nearest(key, keys)}.")
        if "scheduler" not in options:
            raise ValueError("configure_optimizers: a scheduler's dict needs the key 'scheduler'.")
        config = SchedulerConfig(**options)
    else:
        config = SchedulerConfig(given)
    if not all(hasattr(config.scheduler, method) for method in ("step", "state_dict", "load_state_dict")):
        raise TypeError(
            f"configure_optimizers: the scheduler is {_kind(config.scheduler)}, expected one of "
            "torch.optim.lr_scheduler, or an object with step, state_dict and load_state_dict."
        )
    if config.interval not in INTERVALS:
        raise ValueError(f"configure_optimizers: interval={config.interval!r}, expected one of {', '.join(INTERVALS)}.")
    frequency: Any = config.frequency
    if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
        raise ValueError(f"configure_optimizers: frequency={frequency!r}, expected a whole number of 1 or more.")
    if config.needs_metric and config.monitor is None:
        raise ValueError(
            f"configure_optimizers: {type(config.scheduler).__name__} needs the metric it watches: "
            '{"scheduler": …, "monitor": "val/loss"}.'
        )
    if config.needs_metric and config.interval == "step":
        raise ValueError(
            f"configure_optimizers: {type(config.scheduler).__name__} with interval='step' is refused: a metric reduced "
            "over the ranks comes with an epoch or a validation. Use interval='epoch' or 'validation'."
        )
    attached = getattr(config.scheduler, "optimizer", None)
    if attached is not None and all(attached is not optimizer for optimizer in optimizers):
        raise ValueError(
            f"configure_optimizers: the {type(config.scheduler).__name__} drives an optimizer that is not returned."
        )
    return config


def _check_automatic(task: Task, optimizers: list[Optimizer], configs: list[SchedulerConfig]) -> None:
    if len(optimizers) > 1:
        raise ValueError(
            f"{type(task).__name__}.configure_optimizers returned {len(optimizers)} optimizers: automatic optimization "
            "takes one. Set self.automatic_optimization = False and step them in training_step, or give one "
            "optimizer several parameter groups."
        )
    if isinstance(optimizers[0], LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times in one step: set self.automatic_optimization = False and call "
            "optimizer.step(closure) in training_step."
        )
    for config in configs:
        step = inspect.signature(config.scheduler.step)
        required = [p for p in step.parameters.values()
                    if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip
        if len(required) > config.needs_metric and not overrides(task, "lr_scheduler_step", Task):
            raise TypeError(
                f"{type(config.scheduler).__name__}.step{step} takes arguments the trainer does not know: override "
                "lr_scheduler_step in the task; or, where it takes the monitored metric, say reduce_on_plateau=True."
            )


def _nearest(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key, known, 1)
    return f": did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
