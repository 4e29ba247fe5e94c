"""One `validate`, `test` or `predict`: from its arguments to what it returns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .checkpoint.resolve import read
from .checkpoint.state import restore
from .data.loaders import LIMITS
from .data.source import DataSource
from .data_module import DataModule
from .evaluation import PREDICTION, EvaluationLoop, Stage
from .hooks import overrides
from .results import print_results, results_by_loader
from .session import session
from .task import Task
from .task_check import check_initialized, check_task

if TYPE_CHECKING:
    from .trainer import Trainer


def evaluate(
    trainer: Trainer,
    stage: Stage,
    task: Task | None,
    dataloaders: Any,
    ckpt_path: str | os.PathLike[str] | None,
    datamodule: DataModule | None,
    *,
    verbose: bool = False,
    keep: bool = False,
    gather: bool = False,
) -> tuple[list[dict[str, float]], list[list[Any]]]:
    """Run a stage by itself; arguments as of `Trainer.validate` and `Trainer.predict`.

    Args:
        trainer: runs it.
        stage: which.
        task: default: that of the last run.
        dataloaders: a loader, a list of them, or a DataModule.
        ckpt_path: weights to load first.
        datamodule: gives the loaders.
        verbose: print the metrics.
        keep: also return what the step returned.
        gather: as one rank would have, instead of this rank's.

    Returns:
        For each loader, its metrics by name; and with `keep`, what the step returned for each batch.

    Raises:
        TypeError, ValueError: there is no task, no step, no loader, or they don't fit.
        CheckpointError: the checkpoint is not there, damaged, or does not fit.
    """
    method = stage.method
    if isinstance(dataloaders, DataModule):
        dataloaders, datamodule = None, dataloaders
    keeper = trainer.checkpoint_callback
    if task is None and ckpt_path is None and keeper and keeper.best_model_path:
        ckpt_path = "best"
        trainer.print(f"{method} without a task takes the best checkpoint: {keeper.best_model_path}")
    task = task if task is not None else getattr(trainer, "task", None)
    if task is None:
        raise ValueError(f"{method} needs a task: trainer.{method}(task, …), since none was trained before.")
    predicts_by_forward = stage is PREDICTION and overrides(task, "forward", Task)
    check_task(task, method, () if predicts_by_forward else (stage.step,))
    if ckpt_path == "auto":
        raise ValueError(f"ckpt_path='auto' is for fit; {method} takes a path, 'best' or 'last'.")
    with session(trainer, method, task, datamodule or trainer.datamodule) as hooks:
        if ckpt_path is not None:
            restore(trainer, read(trainer, ckpt_path), training=False)
        check_initialized(task)
        # Without DDP's constructor nobody has made the ranks' weights equal.
        trainer.strategy.broadcast_module(task)
        source = DataSource(trainer)
        loaders = source.evaluation(stage.data, stage.loaders, dataloaders)
        if not loaders:
            raise ValueError(
                f"{method} has no loader: give one, or write {stage.loaders} in the task or a DataModule; and "
                f"{LIMITS[stage.data]} must be above 0."
            )
        if stage is PREDICTION:
            trainer.predict_dataloaders = [prepared.loader for prepared in loaders]
        setattr(trainer, stage.flag, True)
        loop = EvaluationLoop(trainer, task, hooks, stage, loaders, source.transfer())
        for index, loader in enumerate(loaders):
            for remark in loader.remarks():
                trainer.print(f"{method}{f', loader {index}' if len(loaders) > 1 else ''}: {remark}")
        logged, kept = loop.run(keep=keep, gather=gather)
        setattr(trainer, stage.flag, False)
    results = results_by_loader(logged, len(loaders))
    if verbose and trainer.is_global_zero:
        print_results(results, method)
    return results, kept
