"""The life of a run around its loop: meet the other ranks, agree, prepare, and clean up whatever happened."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..strategies.launch import relaunch
from .callback_list import with_callbacks_of
from .checkpoint.weights import own_buffers
from .data_module import DataModule
from .hooks import HookTable, check_hooks, overrides
from .run_folder import make_run_folder, name_of_run
from .settings import torch_settings
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer


@contextmanager
def session(trainer: Trainer, stage: str, task: Task, datamodule: DataModule | None) -> Generator[HookTable]:
    """The frame of one fit, validate, test or predict: task and data are set up and on their device inside."""
    if trainer.processes_to_launch:
        relaunch(trainer.processes_to_launch)  # never returns: the ranks run this program from its start
    for busy in (trainer, task.attached_trainer):
        if busy is not None and busy.running:
            raise RuntimeError(
                f"{stage} inside a running {busy.running}, of this Trainer or with this task: they share their state. Wait until "
                "it is over; to evaluate more often, use val_check_interval or several validation loaders."
            )
    check_hooks(task, Task)
    if datamodule is not None:
        check_hooks(datamodule, DataModule)
    trainer.task, trainer.datamodule = task, datamodule
    task.trainer = trainer
    trainer.callbacks = with_callbacks_of(task, trainer.callbacks)
    with ExitStack() as cleanup:
        trainer.running = stage
        cleanup.callback(setattr, trainer, "running", "")
        cleanup.enter_context(torch_settings(trainer.config))
        try:
            trainer.strategy.setup()
            _agree(trainer)
            _prepare_data(trainer)
            cleanup.callback(_teardown, trainer, stage)
            if datamodule is not None:
                datamodule.trainer = trainer
                datamodule.setup(stage)
            for callback in trainer.callbacks:
                callback.setup(trainer, task, stage)
            task.setup(stage)
            task.configure_model()
            trainer.strategy.precision.convert_module(task)
            task.to(trainer.strategy.device)
            own_buffers(task)
            yield HookTable(trainer.callbacks, task)
        except BaseException as error:
            _report(trainer, error)
            raise


def _agree(trainer: Trainer) -> None:
    """One seed and one run folder for all ranks, decided by rank 0 once."""
    seed = trainer.config.seed
    if seed is None:
        # What the program seeded torch with, or the random number torch seeded itself with.
        seed = trainer.strategy.broadcast(torch.initial_seed() % 2**63, name="seed")
    trainer.seed = seed
    if not trainer.has_run_folder:
        name, restart = type(trainer.task).__name__, trainer.strategy.environment.restart
        folder = make_run_folder(name, restart) if trainer.is_global_zero and trainer.writes else name_of_run(name)
        trainer.run_folder = Path(trainer.strategy.broadcast(os.fspath(folder), name="run folder"))


def _prepare_data(trainer: Trainer) -> None:
    """Let the first rank of each host prepare the data, while the others wait."""
    holders: list[tuple[Task | DataModule, type]] = [(trainer.task, Task)]
    if trainer.datamodule is not None:
        holders.insert(0, (trainer.datamodule, DataModule))
    if not any(overrides(holder, "prepare_data", base) for holder, base in holders):
        return
    problem: Exception | None = None
    try:
        if trainer.local_rank == 0:
            for holder, _ in holders:
                holder.prepare_data()
    except Exception as error:
        problem = error
    with trainer.strategy.patience():  # a download may take longer than any collective should
        failures = trainer.strategy.gather_objects(None if problem is None else repr(problem), name="prepare_data")
    if problem is not None:
        raise problem
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"prepare_data failed on rank {rank}: {failure}")


def _teardown(trainer: Trainer, stage: str) -> None:
    trainer.training = trainer.validating = trainer.testing = trainer.predicting = trainer.sanity_checking = False
    trainer.fitting, trainer.active_log = False, None
    for callback in trainer.callbacks:
        callback.teardown(trainer, trainer.task, stage)
    trainer.task.teardown(stage)
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(stage)
    trainer.strategy.teardown()


def _report(trainer: Trainer, error: BaseException) -> None:
    """Tell the callbacks, and torchrun's error file, from which it shows the first failure of all ranks."""
    for callback in trainer.callbacks:
        callback.on_exception(trainer, trainer.task, error)
    if trainer.datamodule is not None:
        trainer.datamodule.on_exception(error)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
