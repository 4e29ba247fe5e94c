"""What a fit is going to do, worked out before it starts: batch sizes, steps, learning rates."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from .config import TrainerConfig
from .data.prepared import PreparedLoader
from .optimization import SchedulerConfig

# Schedules longer than this are not played through in advance (it takes a few microseconds a step).
_MOST_STEPS = 50_000


@dataclass(frozen=True)
class RunPlan:
    """Sizes in samples, lengths in steps. None or inf: not known, or without end."""

    ranks: int
    micro_batch: int | None
    accumulation: int
    batches_per_epoch: int | None
    epochs: float
    total_steps: float
    dataset_size: int | None = None
    """Samples to train on, in all."""
    order: str | None = None
    """What puts them in order, where we deal them."""
    remarks: Mapping[str, str] = field(default_factory=dict[str, str])
    """What to know about the loaders, by a word for what it is about: samples left out, loaders that nobody deals."""

    @property
    def global_batch(self) -> int | None:
        """Samples of a full step, over all ranks."""
        return None if self.micro_batch is None else self.ranks * self.micro_batch * self.accumulation

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch; a short last window is one, too."""
        return None if self.batches_per_epoch is None else math.ceil(self.batches_per_epoch / self.accumulation)


def make_plan(
    config: TrainerConfig,
    loader: PreparedLoader,
    length: int | None,
    val_loaders: Sequence[PreparedLoader],
    ranks: int,
) -> RunPlan:
    """Work out the plan of a fit; `length` is that of an epoch, in micro-batches."""
    epochs = math.inf if config.max_epochs in (None, -1) else config.max_epochs
    per_epoch = math.inf if length is None else math.ceil(length / config.accumulate_grad_batches)
    total = epochs * per_epoch
    if config.max_steps >= 0:
        total = min(total, config.max_steps)
    remarks = {"training": "; ".join(loader.remarks())}
    for index, other in enumerate(val_loaders):
        label = "validation" if len(val_loaders) == 1 else f"validation {index}"
        remarks[label] = "; ".join(other.remarks())
    return RunPlan(
        ranks, loader.batch_size, config.accumulate_grad_batches, length, epochs,
        total if math.isinf(total) else int(total), loader.dataset_size, loader.order,
        {label: text for label, text in remarks.items() if text},
    )  # fmt: skip


@dataclass(frozen=True)
class LearningRates:
    """Of the first parameter group."""

    now: float
    peak: float | None = None
    """The highest from now on; None, as the two below, where it can't be worked out."""
    peak_step: int | None = None
    """The step that takes it, counted from 1 over the whole run."""
    last: float | None = None
    """In the last step."""


def learning_rates(
    optimizer: Optimizer, schedulers: Sequence[SchedulerConfig], plan: RunPlan, done: int = 0
) -> LearningRates:
    """Play the rest of the schedule on copies: the learning rate now, at its highest, and in the last step.

    Args:
        optimizer: as it is now.
        schedulers: as they are now.
        plan: of the fit.
        done: steps taken so far.
    """
    now = float(optimizer.param_groups[0]["lr"])
    follows_metric = any(config.needs_metric or config.interval == "validation" for config in schedulers)
    if not schedulers:
        return LearningRates(now, now, done + 1, now)
    if follows_metric or plan.total_steps - done > _MOST_STEPS or plan.steps_per_epoch is None:
        return LearningRates(now)
    double = _without_parameters(optimizer)
    try:
        # Every reference to the optimizer inside the schedulers leads to the double.
        played = [copy.deepcopy(config.scheduler, {id(optimizer): double}) for config in schedulers]
    except Exception:  # a scheduler of the user's own that can't be copied
        return LearningRates(now)
    rates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the double never steps, which a scheduler would remark on
        for step in range(done + 1, int(plan.total_steps) + 1):
            rates.append(float(double.param_groups[0]["lr"]))
            for config, scheduler in zip(schedulers, played, strict=True):
                count = step if config.interval == "step" else step / plan.steps_per_epoch
                if count == int(count) and count % config.frequency == 0 and step < plan.total_steps:
                    scheduler.step()
    if not rates:
        return LearningRates(now)
    peak = max(rates)
    return LearningRates(now, peak, done + 1 + rates.index(peak), rates[-1])


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same options and no real parameters, for schedulers to act on."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [torch.zeros(())], **copy.deepcopy(options)})
    return torch.optim.SGD(groups, lr=0.0)
