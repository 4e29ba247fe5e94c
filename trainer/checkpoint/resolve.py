"""Which checkpoint `ckpt_path` means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .folder import CheckpointError, newest_intact
from .read import Checkpoint, read_checkpoint
from .staging import put_back

if TYPE_CHECKING:
    from ...callbacks.model_checkpoint import ModelCheckpoint
    from ..trainer import Trainer


def checkpoint_to_resume(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None) -> Checkpoint | None:
    """Read the checkpoint that `fit` goes on from, and take over its seed; None: start anew.

    Raises:
        CheckpointError: it is not there, damaged, or was trained with another seed.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "auto":
        folders = [callback.folder(trainer) for callback in trainer.checkpoint_callbacks]
        ours = newest_intact(folders, trainer.strategy.say) if trainer.is_global_zero else None
        newest = trainer.strategy.broadcast(ours, name="newest checkpoint")
        if newest is None:
            trainer.print(f"ckpt_path='auto': {_why_none(trainer, folders)}, so this run starts anew")
            return None
        ckpt_path = newest
    if ckpt_path == "last" and not trainer.strategy.broadcast(_last_path(trainer), name="last checkpoint"):
        trainer.print("ckpt_path='last': there is no checkpoint yet, so this run starts anew")
        return None
    checkpoint = read(trainer, ckpt_path)
    theirs = checkpoint.training.get("seed", trainer.seed)
    if trainer.config.seed not in (None, theirs):
        raise CheckpointError(
            f"{checkpoint.path} was trained with seed={theirs}, this Trainer has seed={trainer.config.seed}: the order of "
            "the samples depends on it. Use the same, or leave it out."
        )
    trainer.seed = theirs
    where = f"epoch {checkpoint.manifest.get('epoch')}, step {checkpoint.manifest.get('step')}"
    trainer.print(f"resuming from {checkpoint.path} ({where})")
    return checkpoint


def _why_none(trainer: Trainer, folders: Sequence[Path]) -> str:
    if not folders:
        return "there is no ModelCheckpoint, whose folder could be searched"
    places = " and ".join(dict.fromkeys(map(str, folders)))
    if trainer.config.default_root_dir is None and any(trainer.run_folder in folder.parents for folder in folders):
        return f"{places} is this run's own new folder (set default_root_dir to find earlier runs)"
    return f"there is no intact checkpoint in {places}"


def read(trainer: Trainer, ckpt_path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, named by its path, or by "best" or "last" among those the trainer saved.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    if ckpt_path not in ("best", "last"):
        if trainer.is_global_zero:  # a dead run may have been replacing it
            put_back(Path(ckpt_path))
        trainer.strategy.barrier(name="checkpoint to be read")
        return read_checkpoint(ckpt_path)
    callback = trainer.checkpoint_callback
    path = "" if callback is None else _best_path(trainer, callback) if ckpt_path == "best" else _last_path(trainer)
    if not path:
        raise CheckpointError(f"ckpt_path={ckpt_path!r}: this Trainer's ModelCheckpoint has saved none. Give a path.")
    return read_checkpoint(path)


def _best_path(trainer: Trainer, callback: ModelCheckpoint) -> str:
    """The best checkpoint of this run, or of one before in the same folder, by its link; empty: there is none."""
    link = callback.folder(trainer) / "best"
    return callback.best_model_path or (os.fspath(link.resolve()) if link.is_dir() else "")


def _last_path(trainer: Trainer) -> str:
    """The newest checkpoint of this run, or of one before in the same folder; empty: there is none."""
    callback = trainer.checkpoint_callback
    if callback is None:
        return ""
    return callback.last_path or os.fspath(newest_intact([callback.folder(trainer)], trainer.strategy.say) or "")
