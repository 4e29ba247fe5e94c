"""The state of a run: what goes into a checkpoint, and how it comes back. Composed here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...callbacks.callback import Callback
from ...callbacks.wording import counted
from ..data.position import Position, go_on, why_not
from ..randomness import rng_state
from .background import Following
from .folder import CheckpointError
from .plain import check_plain
from .read import Checkpoint
from .snapshot import compact
from .staging import release
from .weights import split_tensors
from .write import Content, write_checkpoint

if TYPE_CHECKING:
    from ..trainer import Trainer


def state_keys(callbacks: Sequence[Callback]) -> list[str]:
    """A key for each callback's state: its `state_key`, numbered where several have the same."""
    keys: list[str] = []
    for callback in callbacks:
        key, number = callback.state_key, 1
        while key in keys:
            number += 1
            key = f"{callback.state_key}#{number}"
        keys.append(key)
    return keys


def training_state(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Everything of training.pt, under Lightning's keys where it has them."""
    task, strategy, progress = trainer.task, trainer.strategy, trainer.progress
    state: dict[str, Any] = {"epoch": progress.epoch, "global_step": progress.global_step}
    if task.hparams:
        state["hyper_parameters"] = dict(task.hparams)
    if weights_only:
        return state
    state |= {
        "progress": progress.state_dict(),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": _callback_states(trainer),
        "strategy": strategy.state_dict(),
        "seed": trainer.seed,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "metric_steps": dict(trainer.metric_steps),
        "position": None if trainer.position is None else trainer.position.state(),
    }
    if trainer.training_loop is not None:
        state["loop"] = trainer.training_loop.state_dict()
    if trainer.datamodule is not None and (data_state := trainer.datamodule.state_dict()):
        state["datamodule"] = data_state
    return state


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    keyed = zip(state_keys(trainer.callbacks), trainer.callbacks, strict=True)
    return {key: state for key, callback in keyed if (state := callback.state_dict())}


def state_of_rank(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Everything of this rank's own file."""
    state: dict[str, Any] = {"rng": rng_state()}
    if weights_only:
        return state
    if own := trainer.strategy.rank_state_dict():
        state["strategy"] = own
    keyed = zip(state_keys(trainer.callbacks), trainer.callbacks, strict=True)
    if theirs := {key: mine for key, callback in keyed if (mine := callback.rank_state_dict())}:
        state["callbacks_of_rank"] = theirs
    data = trainer.training_data
    if data is not None and (where := data.state_dict(trainer.progress.batch_idx, over=trainer.epoch_is_over)):
        state["loader"] = where
    if trainer.training_loop is not None:
        state["metrics"] = trainer.training_loop.metrics_state_dict()
    if trainer.strategy.uneven_inputs == "join":  # some ranks have had fewer micro-batches, and fewer hooks
        state |= {"progress": trainer.progress.state_dict(), "callbacks": _callback_states(trainer)}
    return state


_NOTHING_FOLLOWS = Following()


def save(
    trainer: Trainer,
    path: Path,
    *,
    weights_only: bool = False,
    following: Following = _NOTHING_FOLLOWS,
    background: bool = False,
) -> None:
    """Write a checkpoint of the run, all ranks together; arguments as in `Trainer.start_checkpoint`.

    Raises:
        CheckpointError: no run has begun, or this checkpoint, or the one before, could not be written.
        TypeError: the state holds something that could not be loaded again.
    """
    strategy, writer = trainer.strategy, trainer.saves.writer
    if getattr(trainer, "task", None) is None:
        raise CheckpointError(
            f"there is nothing to save in {path} yet: this Trainer has no task before its first run. Call fit first, or "
            "save_checkpoint in a hook."
        )
    import_module("safetensors.torch")  # not in the thread: a process that is forked during an import may wait for it
    try:
        writer.make_way()
        content = _content(trainer, weights_only=weights_only)
        gather = strategy.background_gather() if background else None
        content = Content(**(compact if gather is None else writer.memory.snapshot)(vars(content)))
    except BaseException:
        release(path)
        raise

    def write() -> None:
        try:
            write_checkpoint(path, content, strategy.rank, gather or strategy.gather_objects, following.committed)
        finally:
            release(path)

    if gather is not None:
        writer.start(path, write, following, trainer.control)
    else:
        write()
        following.settled()
        following.retire()


def _content(trainer: Trainer, *, weights_only: bool) -> Content:
    """What a checkpoint of this moment holds; what other ranks write is left out. Tensors are those of the run itself."""
    task, strategy = trainer.task, trainer.strategy
    strategy.synchronize(task)  # what is saved is what all go on with
    strategy.check_same_parameters(task, name="parameters of the checkpoint")
    checkpoint = training_state(trainer, weights_only=weights_only)
    checkpoint["state_dict"] = strategy.model_state(task)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, task, checkpoint)
    task.on_save_checkpoint(checkpoint)
    tensors, extra = split_tensors(checkpoint.pop("state_dict"))
    rank_state = state_of_rank(trainer, weights_only=weights_only)
    check_plain(checkpoint, "checkpoint")
    check_plain(extra, "the extra state of the model")
    check_plain(rank_state, "the rank's state")
    if extra:
        checkpoint["extra_state"] = extra
    description = {
        "task": type(task).__qualname__,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "world_size": trainer.world_size,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights_only": weights_only,
    }
    first = strategy.rank == 0
    return Content(tensors if first else {}, checkpoint if first else {}, rank_state, description)


def restore(
    trainer: Trainer, checkpoint: Checkpoint, *, training: bool, rank_state: Mapping[str, Any] | None = None
) -> None:
    """Bring task and trainer to a checkpoint's state. Random numbers come back later, when the loader has begun.

    Args:
        trainer: the run.
        checkpoint: what was read.
        training: also optimizers, schedulers, callbacks and progress.
        rank_state: what it has of this rank alone.

    Raises:
        CheckpointError: it does not fit the task, its optimizers, or the number of ranks.
    """
    task, strategy = trainer.task, trainer.strategy
    state = checkpoint.as_dict()
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, task, state)
    task.on_load_checkpoint(state)
    try:
        strategy.load_model_state(task, state["state_dict"], strict=task.strict_loading)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit {type(task).__name__}: {error}") from error
    if trainer.datamodule is not None and "datamodule" in state:
        trainer.datamodule.load_state_dict(state["datamodule"])
    if not training:
        return
    if "progress" not in state:
        raise CheckpointError(
            f"{checkpoint.path} holds weights only: training can't resume from it. Load the weights with "
            f"{type(task).__name__}.load_from_checkpoint, and start a new run."
        )
    _check_counts(checkpoint, state, trainer)
    for optimizer, theirs in zip(trainer.optimizers, state["optimizer_states"], strict=True):
        try:
            strategy.load_optimizer_state(optimizer, theirs)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{checkpoint.path} does not fit the {type(optimizer).__name__} of configure_optimizers: {error}"
            ) from error
    strategy.load_state_dict(state.get("strategy", {}))
    own = rank_state or {}
    state |= {key: own[key] for key in ("progress", "callbacks") if key in own}
    for config, theirs in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(theirs)
    for key, callback in zip(state_keys(trainer.callbacks), trainer.callbacks, strict=True):
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
        if key in own.get("callbacks_of_rank", {}):
            callback.load_rank_state_dict(own["callbacks_of_rank"][key])
    trainer.progress.load_state_dict(state["progress"])
    _find_place(trainer, checkpoint, Position.from_state(state.get("position")), own.get("loader", {}))
    metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["metrics"].items()}
    trainer.callback_metrics.update(metrics)
    trainer.metric_steps.update(state["metric_steps"])


def _check_counts(checkpoint: Checkpoint, state: dict[str, Any], trainer: Trainer) -> None:
    for what, key, mine in (
        ("optimizer", "optimizer_states", trainer.optimizers),
        ("LR scheduler", "lr_schedulers", trainer.lr_scheduler_configs),
    ):
        if len(state[key]) != len(mine):
            raise CheckpointError(
                f"{checkpoint.path} holds {counted(len(state[key]), what)}, configure_optimizers returned {len(mine)}: expected "
                "the same."
            )
    for theirs, optimizer in zip(state.get("optimizers", ()), trainer.optimizers, strict=False):
        if theirs != type(optimizer).__name__:
            raise CheckpointError(
                f"{checkpoint.path} holds the state of {theirs}, configure_optimizers returned {type(optimizer).__name__}: "
                "expected the same. To go on with another optimizer, load the weights with load_from_checkpoint, and start "
                "a new run."
            )


def _find_place(trainer: Trainer, checkpoint: Checkpoint, then: Position | None, loader_state: dict[str, Any]) -> None:
    """Let the training loader go on where it stood, on as many ranks or on others.

    Raises:
        CheckpointError: inside an epoch, what is left of it would differ.
    """
    loader, progress, now = trainer.training_data, trainer.progress, trainer.position
    inside = progress.batch_idx > 0
    if then is None or now is None or loader is None:
        return  # taken before a fit
    if inside and (reason := why_not(then, now, trainer.config.resume_batch)):
        raise CheckpointError(
            f"{checkpoint.path} was taken inside epoch {progress.epoch} {reason}, or resume from a checkpoint of an epoch's "
            "end."
        )
    if then.world_size == now.world_size:
        try:
            loader.load_state_dict(loader_state, inside=inside)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error
    if inside:
        go_on(loader, then, now, progress)
    elif then.world_size != now.world_size and then.items_of_all != now.items_of_all:
        trainer.print(
            f"on {counted(now.world_size, 'rank')} instead of {then.world_size}, each step takes another number of samples than "
            "before the resume: batches of this loader are what it makes them"
            if trainer.config.resume_batch == "keep"
            else f"resume_batch='scale': {now.items_of_all} instead of {then.items_of_all} at once from here on"
        )
