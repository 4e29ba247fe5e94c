"""The check of a user's own `Task`: what a run needs of it and it lacks, and what it has that the run would pass over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import cast

from torch import nn
from torch.nn.parameter import is_lazy

from ..strategies.base import Strategy
from .config import TrainerConfig
from .hooks import overrides
from .misnomers import check_names
from .task import Task


def check_task(task: Task, purpose: str, needed: Sequence[str]) -> None:
    """Refuse what is no task, and one without the methods that are needed.

    Args:
        task: the user's, which may be anything.
        purpose: what it is given to, for the message.
        needed: names of methods that it must have of its own.

    Raises:
        TypeError: says what to give, or names the missing method.
    """
    if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(getattr(task, "_orig_mod", None), Task):
            raise TypeError(
                f"expected a Task, received a compiled one: give the plain task to {purpose}, and let the strategy compile "
                "its step, Trainer(strategy=DDPStrategy(compile='before_ddp')), so that it is split at DDP's buckets."
            )
        raise TypeError(f"expected a Task, received {type(task).__name__}: subclass samestep.trainer.Task.")
    if "_modules" not in vars(task):
        raise TypeError(f"{type(task).__name__}.__init__ has not called super().__init__(): expected it first.")
    for name in needed:
        if not overrides(task, name, Task):
            check_names(type(task), Task)  # it may be there under another name
            raise TypeError(
                f"{type(task).__name__} has no {name}, which {purpose} needs: expected a method of that name."
            )


def check_initialized(task: Task) -> None:
    """Refuse parameters that wait for a first batch to get their shape.

    Raises:
        ValueError: names the first module that has some.
    """
    for name, module in cast("Iterator[tuple[str, nn.Module]]", task.named_modules()):
        if any(is_lazy(tensor) for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
            raise ValueError(
                f"{name} ({type(module).__name__}) has no shapes yet: it takes them from its first batch, but the optimizer "
                "and the other ranks need them before. Run a made-up batch through once, in configure_model: "
                "`with torch.no_grad(): self(torch.zeros(…))`."
            )


def check_optimization(task: Task, config: TrainerConfig, strategy: Strategy) -> None:
    """Refuse options and overrides that would be passed over in training.

    Raises:
        ValueError: names what excludes what.
    """
    if not task.automatic_optimization:
        _check_manual(config)
    if strategy.scaler is not None:
        own = _overridden(task, "optimizer_step", "backward")
        if own or not task.automatic_optimization:
            raise ValueError(
                f"precision='16-mixed' with {own if task.automatic_optimization else 'automatic_optimization=False'}: the "
                "trainer scales the loss and decides whether a step is taken, which the task would pass over. Use "
                "bf16-mixed, which needs no scaling."
            )
    if strategy.optimizer_in_backward and (
        own := _overridden(
            task, "optimizer_step", "configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward"
        )
    ):
        raise ValueError(
            f"optimizer_in_backward with {type(task).__name__}.{own}: when it is called, the parameters are updated "
            "already. Leave one of them out."
        )


def _check_manual(config: TrainerConfig) -> None:
    if config.accumulate_grad_batches != 1 or config.gradient_clip_val is not None:
        raise ValueError(
            "accumulate_grad_batches and gradient_clip_val work with automatic optimization only: with "
            "automatic_optimization=False, accumulate and clip in training_step (self.clip_gradients)."
        )
    if config.skip_nonfinite is not None:
        raise ValueError(
            "skip_nonfinite with automatic_optimization=False: the task steps its optimizers by itself. Leave it out, and "
            "look at the gradients in training_step."
        )


def _overridden(task: Task, *names: str) -> str:
    """The first of these methods that the task has of its own; empty: none."""
    return next((name for name in names if overrides(task, name, Task)), "")
