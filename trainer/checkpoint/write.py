"""Writing a checkpoint: all ranks together, beside its place, complete or not at all."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .files import save_state
from .folder import (
    MANIFEST,
    MODEL,
    TRAINING,
    CheckpointError,
    fingerprint,
    is_checkpoint,
    now,
    rank_file,
    sealed,
    synced,
)
from .migrations import FORMAT
from .staging import claim, old_of, staging_of, sweep
from .weights import are_finite, save_tensors

T = TypeVar("T")
Gather = Callable[..., list[Any]]
"""`gather(value, name=…)`: every rank's value, in the order of the ranks."""


@dataclass(frozen=True)
class Content:
    """What goes into the files of a checkpoint."""

    model: dict[str, Tensor]
    """For model.safetensors."""
    training: dict[str, Any]
    """For training.pt."""
    rank_state: dict[str, Any]
    """For this rank's file."""
    description: dict[str, Any]
    """For the manifest, beside `format`, `created`, `versions`, `finite`, `files` and `sha256`."""


def write_checkpoint(
    path: Path, content: Content, rank: int, gather: Gather, committed: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint, all ranks together; when it returns, the folder is there and complete on all of them.

    Args:
        path: the folder to make; a checkpoint or an empty folder that is there is replaced, anything else is not.
        content: rank 0 writes what is common, each rank its own file.
        rank: this one.
        gather: how the ranks agree that all went well. Its group must be this thread's alone.
        committed: called on rank 0 when the checkpoint is in its place.

    Raises:
        CheckpointError: on every rank, if one of them could not write. A checkpoint that was there before is kept. What
            is half written is removed with `release`.
    """
    staging = staging_of(path)

    def make_folder() -> None:
        if not claim(path):
            raise FileExistsError("another run is writing a checkpoint of that name")
        if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
            raise FileExistsError("there is something else of that name, which is not replaced")
        sweep(path.parent)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def write_files() -> dict[str, dict[str, Any]]:
        mine = staging / rank_file(rank)
        save_state(content.rank_state, mine)
        written = [mine]
        if rank == 0:
            save_tensors(content.model, staging / MODEL)
            synced(staging / MODEL)
            save_state(content.training, staging / TRAINING)
            written += [staging / MODEL, staging / TRAINING]
        return {file.name: fingerprint(file) for file in written}  # of what can be read back

    def commit(told: list[dict[str, dict[str, Any]]]) -> None:
        for writer, files in enumerate(told[1:], 1):
            for name, expected in files.items():
                if not (staging / name).exists() or fingerprint(staging / name) != expected:
                    raise FileNotFoundError(
                        f"{name} is not here as rank {writer} wrote it: expected a folder that all hosts share"
                    )
        manifest = {
            "format": FORMAT,
            "created": now(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **content.description,
            "finite": are_finite(content.model),
            "files": {name: files[name] for files in told for name in sorted(files)},
        }
        with open(staging / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(sealed(manifest), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        synced(staging)
        old = old_of(path)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        staging.rename(path)
        synced(path.parent)
        shutil.rmtree(old, ignore_errors=True)
        committed()

    written = partial(_together, gather, path)
    written(make_folder if rank == 0 else None, "staging")
    told = written(write_files, "files")
    written(partial(commit, told) if rank == 0 else None, "commit")


def _together(gather: Gather, path: Path, work: Callable[[], T] | None, what: str) -> list[T]:
    """Do this rank's part of a work; wait for all, and return what each got; raise on all if one failed."""
    problem, result = "", None
    try:
        if work is not None:
            result = work()
    except Exception as error:  # of the file system, or of a library that wraps it
        problem = f"{type(error).__name__}: {error}"
    every: list[tuple[str, Any]] = gather((problem, result), name=f"checkpoint {what}")
    for rank, (theirs, _) in enumerate(every):
        if theirs:
            error = CheckpointError(
                f"the checkpoint {path} could not be written on rank {rank}: {theirs}. Earlier checkpoints are intact. "
                "Make room or permission, or choose another folder with default_root_dir."
            )
            error.rank = rank
            raise error
    return [result for _, result in every]
