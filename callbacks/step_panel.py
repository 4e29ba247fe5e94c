"""The step panel: what one optimizer step of this run will be, said before the first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class StepPanel(Callback):
    """Prints, when training starts, the global batch, steps, dropped samples, precision, and learning rates."""

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Print the panel, from rank 0."""
        trainer.print(panel(trainer, task))


def panel(trainer: Trainer, task: Task) -> str:
    """The panel as text."""
    lines = {"step": _batch(trainer), "length": _length(trainer)}
    plan = trainer.plan
    if plan is not None and plan.dropped:
        lines["dropped"] = f"{plan.dropped:,} samples of each epoch: they can't be dealt evenly to {plan.ranks} ranks"
    trainable = sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in task.parameters() if not parameter.requires_grad)
    lines["parameters"] = f"{trainable:,} trainable, {frozen:,} not"
    lines["precision"] = trainer.strategy.precision.name
    if trainer.optimizers:
        lines["learning rate"] = _rates(trainer)
    strategy = trainer.strategy
    lines["strategy"] = f"{strategy.name} on {strategy.device.type}"
    lines |= strategy.describe()
    width = max(map(len, lines)) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines.items())


def _batch(trainer: Trainer) -> str:
    plan = trainer.plan
    if plan is None or plan.global_batch is None:
        return f"{trainer.world_size} ranks × micro-batch (not known) × {trainer.config.accumulate_grad_batches} accumulated"
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    return f"{ranks} × micro-batch {plan.micro_batch} × {plan.accumulation} accumulated = {plan.global_batch:,} samples"


def _length(trainer: Trainer) -> str:
    plan = trainer.plan
    if plan is None:
        return "not known"
    per_epoch = "? steps" if plan.steps_per_epoch is None else f"{plan.steps_per_epoch:,} steps"
    epochs = "until stopped" if math.isinf(plan.epochs) else f"{plan.epochs:,.0f} epochs"
    total = "no end known" if math.isinf(plan.total_steps) else f"{plan.total_steps:,.0f} steps in all"
    done = f"; {trainer.global_step:,} done" if trainer.global_step else ""
    return f"{per_epoch} an epoch, {epochs}: {total}{done}"


def _rates(trainer: Trainer) -> str:
    rates = trainer.learning_rates()
    if rates.peak is None or rates.last is None:
        return f"{rates.now:.3g} now; it follows a metric, or is too long to work out"
    if rates.now == rates.peak == rates.last:
        return f"{rates.now:.3g}"
    return f"{rates.now:.3g} now, {rates.peak:.3g} at its highest (step {(rates.peak_step or 0) + 1:,}), {rates.last:.3g} last"
