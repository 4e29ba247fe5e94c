"""The callbacks of a trainer: the user's, the ones added for them, and their order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from ..callbacks.callback import Callback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.logger import Logger, SilentLogger
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress_bar import ProgressBar
from ..callbacks.step_panel import StepPanel
from ..callbacks.tensorboard import TensorBoardLogger
from .config import TrainerConfig
from .hooks import check_hooks, check_logger
from .task import Task


def all_callbacks(
    config: TrainerConfig,
    given: Callback | Sequence[Callback] | None,
    logger: Logger | Sequence[Logger] | bool | None,
    *,
    development: bool,
) -> list[Callback]:
    """The callbacks in the order in which their hooks run.

    Args:
        config: says which kinds are added where none is given.
        given: the user's.
        logger: the user's loggers; they replace the default one.
        development: `fast_dev_run`, which leaves no trace and stops for nothing.

    Raises:
        TypeError, ValueError: one is no callback, is given twice, contradicts an option, or has a wrong hook.
    """
    if given is not None and not isinstance(given, (Callback, list, tuple)):
        raise TypeError(f"callbacks={given!r}: expected a Callback object, or a list of them.")
    callbacks = [given] if isinstance(given, Callback) else list(given or ())
    if isinstance(logger, Logger):
        callbacks.append(logger)
    elif isinstance(logger, (list, tuple)):
        callbacks += logger
    elif logger is not None and not isinstance(logger, bool):
        raise TypeError(f"logger={logger!r}: expected True, False, a Logger object, or a list of them.")
    for callback in callbacks:
        check_callback(callback)
    if len(set(map(id, callbacks))) != len(callbacks):
        raise ValueError("the same callback object is given twice: expected each once.")
    if development:
        callbacks = [c for c in callbacks if not isinstance(c, (Logger, ModelCheckpoint, EarlyStopping))]
        callbacks.append(SilentLogger())

    def missing(kind: type) -> bool:
        return not any(isinstance(callback, kind) for callback in callbacks)

    if not config.enable_checkpointing and not development and not missing(ModelCheckpoint):
        raise ValueError("enable_checkpointing=False, but the callbacks hold a ModelCheckpoint: drop one of them.")
    if config.enable_model_summary:
        callbacks += [kind() for kind in (ModelSummary, StepPanel) if missing(kind)]
    if config.enable_progress_bar and missing(ProgressBar):
        callbacks.append(ProgressBar())
    # Loggers given as `logger` replace the default one; those among the callbacks stand beside it.
    if config.logger and (logger is None or logger is True) and missing(TensorBoardLogger):
        callbacks.append(TensorBoardLogger())
    if config.enable_checkpointing and missing(ModelCheckpoint):
        callbacks.append(ModelCheckpoint())
    if faults := os.environ.get("SAMESTEP_CHAOS"):
        from ..callbacks.chaos import Chaos

        callbacks.append(Chaos(faults))
    return _ordered(callbacks)


def with_callbacks_of(task: Task, callbacks: list[Callback]) -> list[Callback]:
    """The same, with the task's `configure_callbacks` in place of those of the same class."""
    own = task.configure_callbacks()
    own = list(cast("list[Callback]", own)) if isinstance(own, (list, tuple)) else [cast("Callback", own)]
    for callback in own:
        check_callback(callback)
    kinds = {type(callback) for callback in own}
    return _ordered([*(callback for callback in callbacks if type(callback) not in kinds), *own])


def check_callback(callback: Callback) -> None:
    """Refuse what is no callback, and callbacks with wrong hooks."""
    if not isinstance(callback, Callback):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise TypeError(f"callbacks hold {what}: expected objects of subclasses of Callback.")
    check_hooks(callback, Callback)
    if isinstance(callback, Logger):
        check_logger(callback)


def _ordered(callbacks: list[Callback]) -> list[Callback]:
    """Those who decide by metrics last, and the checkpoints behind them: they save what the others decided."""
    return sorted(callbacks, key=lambda callback: (callback.monitors, isinstance(callback, ModelCheckpoint)))
