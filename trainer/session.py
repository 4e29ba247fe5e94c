"""The life of a run around its loop: meet the other ranks, agree, prepare, and clean up whatever happened."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..strategies import process_groups
from ..strategies.error_file import record_error
from ..strategies.first_cause import PeerError, text_of
from ..strategies.launch import end_with_launcher, refuse_import_of_main, relaunch
from ..strategies.process_group_strategy import ProcessGroupStrategy
from .agreement import compare, options_of
from .callback_list import with_callbacks_of
from .checkpoint.weights import own_buffers
from .data_module import DataModule
from .hangs import HangWatch
from .hooks import HookTable, check_hooks, overrides
from .hyperparameters import check_hyperparameters
from .run_folder import make_run_folder, name_of_run
from .settings import torch_settings
from .signals import SignalHandlers, deaf_to_workers
from .status import end_with, place_of, write_status
from .task import Task
from .task_check import check_initialized

if TYPE_CHECKING:
    from .trainer import Trainer


@contextmanager
def session(trainer: Trainer, stage: str, task: Task, datamodule: DataModule | None) -> Generator[HookTable]:
    """The frame of one fit, validate, test or predict: task and data are set up and on their device inside."""
    refuse_import_of_main(stage)
    if trainer.processes_to_launch:
        relaunch(
            trainer.processes_to_launch, max_restarts=trainer.config.max_restarts
        )  # never returns: the ranks run this program from its start
    for busy in (trainer, task.attached_trainer):
        if busy is not None and busy.running:
            raise RuntimeError(
                f"{stage} inside a running {busy.running}, of this Trainer or with this task: they share their state. Wait until "
                "it is over; to evaluate more often, use val_check_interval or several validation loaders."
            )
    check_hooks(task, Task)
    check_hyperparameters(task)
    if datamodule is not None:
        check_hooks(datamodule, DataModule)
        check_hyperparameters(datamodule)
    trainer.task, trainer.datamodule = task, datamodule
    task.trainer = trainer
    trainer.callbacks = with_callbacks_of(task, trainer.callbacks)
    with ExitStack() as cleanup:
        trainer.running = stage
        cleanup.callback(setattr, trainer, "running", "")
        cleanup.enter_context(torch_settings(trainer.config))
        trainer.signals = SignalHandlers(
            enabled=trainer.config.enable_signal_handlers,
            rank=trainer.global_rank,
            note_exit=partial(_note_exit, trainer),
        )
        cleanup.enter_context(trainer.signals)
        failure: BaseException | None = None
        prepared = False
        try:
            end_with_launcher()
            trainer.strategy.setup()
            _agree(trainer, stage)
            _watch(trainer, cleanup)
            _prepare_data(trainer)
            prepared = True
            if datamodule is not None:
                datamodule.trainer = trainer
                datamodule.setup(stage)
            for callback in trainer.callbacks:
                callback.setup(trainer, task, stage)
            task.setup(stage)
            task.configure_model()
            if stage == "fit":
                check_initialized(task)
            trainer.strategy.precision.convert_module(task)
            task.to(trainer.strategy.device)
            own_buffers(task)
            yield HookTable(trainer.callbacks, task)
        except BaseException as error:
            cleanup.enter_context(deaf_to_workers())
            failure = end_with(trainer, error)
            _report(trainer, failure)
            if failure is error:
                raise
            raise failure from None  # what this rank saw is noise beside what it came from
        finally:
            if prepared:
                _teardown(trainer, stage, failure)
        if stage == "fit" and trainer.is_global_zero:
            write_status(trainer, "completed", reason=trainer.stop_reason, exit_code=trainer.signals.exit_code)


def _note_exit(trainer: Trainer, status: str, reason: str, code: int) -> None:
    if trainer.running == "fit":
        rank, place = trainer.global_rank, place_of(trainer)
        write_status(trainer, status, rank=rank, place=place, reason=reason, exit_code=code)


def _agree(trainer: Trainer, stage: str) -> None:
    """The same options on all ranks; one seed and one run folder, decided by rank 0 once."""
    folder_is_known = trainer.has_run_folder
    if trainer.is_global_zero:
        if not folder_is_known:
            name, again = type(trainer.task).__name__, trainer.strategy.started_again
            trainer.run_folder = make_run_folder(name, again=again) if trainer.writes else name_of_run(name)
        if stage == "fit":
            write_status(trainer, "running")  # before the others go on: one that fails writes over it
    compare(trainer.strategy, options_of(trainer.config, trainer.strategy), "options")
    seed = trainer.config.seed
    if seed is None:
        # What the program seeded torch with, or the random number torch seeded itself with.
        seed = trainer.strategy.broadcast(torch.initial_seed() % 2**63, name="seed")
    trainer.seed = seed
    if not folder_is_known:
        folder = os.fspath(trainer.run_folder) if trainer.is_global_zero else ""
        trainer.run_folder = Path(trainer.strategy.broadcast(folder, name="run folder"))


def _watch(trainer: Trainer, cleanup: ExitStack) -> None:
    """Let a thread watch this rank, where others may come to wait for it."""
    strategy, limit = trainer.strategy, trainer.config.hang_timeout
    trainer.hang_watch = None
    if limit is None or trainer.world_size == 1 or not isinstance(strategy, ProcessGroupStrategy):
        return
    exits = trainer.config.hang_action == "exit"
    trainer.hang_watch = HangWatch(trainer, strategy, strategy.groups.store_of_watch(), limit, exits=exits)
    trainer.hang_watch.start()
    cleanup.callback(trainer.hang_watch.stop)


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
    told = None if problem is None else f"{type(problem).__name__}: {text_of(problem)}"
    with trainer.strategy.patience():  # a download may take longer than any collective should
        failures = trainer.strategy.gather_objects(told, name="prepare_data")
    if problem is not None:
        raise problem
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise PeerError(f"prepare_data failed on rank {rank}: {failure}")


def _teardown(trainer: Trainer, stage: str, failure: BaseException | None) -> None:
    """Let go of everything, also of what comes behind one that fails. The first failure of the run is raised."""
    trainer.training = trainer.validating = trainer.testing = trainer.predicting = trainer.sanity_checking = False
    trainer.fitting, trainer.active_log = False, None

    def come_to_the_end() -> None:
        """A fit is complete when it is on every rank: one may fail behind the last collective, and then tells why."""
        if stage == "fit" and first is None:
            with trainer.strategy.patience():  # rank 0 may be exporting the model
                trainer.strategy.barrier(name="end of the run")

    parts: list[Callable[[], Any]] = [partial(trainer.saves.writer.close, failed=failure is not None)]
    parts += [partial(each.teardown, trainer, trainer.task, stage) for each in trainer.callbacks]
    parts.append(partial(trainer.task.teardown, stage))
    if trainer.datamodule is not None:
        parts.append(partial(trainer.datamodule.teardown, stage))
    parts.append(come_to_the_end)
    parts.append(trainer.strategy.teardown)
    first = failure
    for teardown in parts:
        try:
            teardown()
        except Exception as error:
            if first is None:
                with deaf_to_workers():
                    first = end_with(trainer, error)
                    _report(trainer, first)
            else:
                _show_beside(first, error, "teardown")
    if failure is None and first is not None:
        raise first


def _report(trainer: Trainer, error: BaseException) -> None:
    """Tell the error file, from which torch's agent shows the first failure of all ranks; then who wants to know."""
    record_error(error)
    trainer.fitting = False  # a checkpoint that is asked for now is written now: no step will end any more
    if trainer.control.in_flight:
        process_groups.abandon()
    told: list[Callable[[], Any]] = [
        partial(callback.on_exception, trainer, trainer.task, error) for callback in trainer.callbacks
    ]
    if trainer.datamodule is not None:
        told.append(partial(trainer.datamodule.on_exception, error))
    for on_exception in told:
        try:
            on_exception()
        except Exception as another:
            _show_beside(error, another, "on_exception")


def _show_beside(first: BaseException, another: Exception, where: str) -> None:
    """Print a later error at once: the first is the cause, and is the one that is raised."""
    print(f"samestep: {where} failed, too, after {type(first).__name__}: {text_of(first)}", file=sys.stderr)
    traceback.print_exception(type(another), another, another.__traceback__, chain=False)
