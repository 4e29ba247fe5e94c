"""The step panel: what one optimizer step of this run will be, said before the first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .callback import Callback
from .wording import counted

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class StepPanel(Callback):
    """Prints, when training starts, the global batch, steps, samples left out, precision, and learning rates."""

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Print the panel, from rank 0."""
        trainer.print(panel(trainer, task))


def panel(trainer: Trainer, task: Task) -> str:
    """The panel as text."""
    lines = {"step": _batch(trainer), "length": _length(trainer)}
    if trainer.plan is not None:
        lines |= trainer.plan.remarks
    if _no_step_is_logged(trainer):
        lines["logging"] = _why_nothing(trainer)
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
    plan, accumulated = trainer.plan, trainer.config.accumulate_grad_batches
    ranks = counted(trainer.world_size, "rank")
    if plan is None or plan.global_batch is None:
        return f"{ranks} × micro-batch (not known) × {accumulated} accumulated"
    return (
        f"{ranks} × micro-batch {plan.micro_batch} × {accumulated} accumulated = {counted(plan.global_batch, 'sample')}"
    )


def _length(trainer: Trainer) -> str:
    plan = trainer.plan
    if plan is None:
        return "not known"
    per_epoch = "? steps" if plan.steps_per_epoch is None else counted(plan.steps_per_epoch, "step")
    epochs = "until stopped" if math.isinf(plan.epochs) else counted(plan.epochs, "epoch")
    total = "no end known" if math.isinf(plan.total_steps) else f"{counted(plan.total_steps, 'step')} in all"
    done = f"; {trainer.global_step:,} done" if trainer.global_step else ""
    return f"{per_epoch} an epoch, {epochs}: {total}{done}"


def _no_step_is_logged(trainer: Trainer) -> bool:
    """Whether the run ends before the next step at which values of steps are logged."""
    plan, every = trainer.plan, trainer.config.log_every_n_steps
    if plan is None or math.isinf(plan.total_steps):
        return False
    return trainer.global_step < plan.total_steps and plan.total_steps // every == trainer.global_step // every


def _why_nothing(trainer: Trainer) -> str:
    assert trainer.plan is not None
    every, left = trainer.config.log_every_n_steps, int(trainer.plan.total_steps) - trainer.global_step
    return f"no values of steps: the run ends before log_every_n_steps={every} is reached; set it to {left} or less"


def _rates(trainer: Trainer) -> str:
    rates = trainer.learning_rates()
    if rates.peak is None or rates.last is None:
        return f"{rates.now:.3g} now; what follows depends on a metric or the task, or is too long to work out"
    if rates.now == rates.peak == rates.last:
        return f"{rates.now:.3g}"
    from_here = " from here on" if trainer.global_step else ""
    return f"{rates.now:.3g} now, {rates.peak:.3g} at its highest{from_here} (step {rates.peak_step:,}), {rates.last:.3g} last"
