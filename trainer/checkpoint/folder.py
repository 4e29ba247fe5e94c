"""A checkpoint's folder: written beside its place, complete or not at all, and checked when read.

model.safetensors   the task's weights, under its own names
training.pt         optimizers, schedulers, progress, callbacks, hyperparameters
rank-00000.pt …     what differs from rank to rank: random numbers
manifest.json       written last: versions, step, metrics, size and checksum of each file
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import torch

from ...strategies.base import Strategy
from .plain import check_plain
from .staging import claim, release, staging_of
from .weights import load_tensors, save_tensors, split_tensors

FORMAT = 1
_MODEL, _TRAINING, _MANIFEST = "model.safetensors", "training.pt", "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, read, or trusted. The message names the file and says what to do."""


@dataclass
class Checkpoint:
    """What was read from a folder."""

    path: Path
    model: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict[str, Any])
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])

    def as_dict(self) -> dict[str, Any]:
        """One dict with Lightning's keys, as the hooks `on_load_checkpoint` get it."""
        return {**self.training, "state_dict": self.model}


def write_checkpoint(
    path: Path,
    strategy: Strategy,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    description: Mapping[str, Any],
) -> None:
    """Write a checkpoint, all ranks together; when it returns, the folder is there and complete on all of them.

    Args:
        path: the folder to make; a checkpoint or an empty folder that is there is replaced, anything else is not.
        strategy: the ranks. Rank 0 writes what is common, each rank its own file.
        model: the task's state dict.
        training: goes into training.pt.
        rank_state: goes into this rank's file.
        description: goes into the manifest beside `format`, `created`, `versions` and `files`.

    Raises:
        CheckpointError: on every rank, if one of them could not write; nothing is left behind, and a checkpoint
            that was there before is kept.
        TypeError: the state holds something that could not be loaded again.
    """
    check_plain(dict(training), "checkpoint")
    check_plain(dict(rank_state), "the rank's state")
    tensors, extra = split_tensors(model)
    check_plain(extra, "the extra state of the model")
    staging = staging_of(path)
    first = strategy.rank == 0

    def make_folder() -> None:
        if not claim(path):
            raise FileExistsError("another run is writing a checkpoint of that name")
        if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
            raise FileExistsError("there is something else of that name, which is not replaced")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def write_files() -> None:
        if first:
            save_tensors(tensors, staging / _MODEL)
            _synced(staging / _MODEL)
            _save({**training, **({"extra_state": extra} if extra else {})}, staging / _TRAINING)
        _save(dict(rank_state), staging / _rank_file(strategy.rank))

    def commit() -> None:
        files = {file.name: _fingerprint(file) for file in sorted(staging.iterdir())}
        manifest = {
            "format": FORMAT,
            "created": _now(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **description,
            "files": files,
        }
        with open(staging / _MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _synced(staging)
        old = path.parent / f".{path.name}.old"
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        staging.rename(path)
        _synced(path.parent)
        shutil.rmtree(old, ignore_errors=True)

    try:
        _together(strategy, make_folder if first else None, path, "staging")
        _together(strategy, write_files, path, "files")
        _together(strategy, commit if first else None, path, "commit")
    finally:
        if first:
            release(path)


# Of the newest checkpoint that this process wrote or read.
_created = datetime.min.replace(tzinfo=timezone.utc)


def _now() -> str:
    """The time in UTC, later than that of every checkpoint written or read before, even where the clock was put back."""
    global _created
    _created = max(datetime.now(timezone.utc), _created + timedelta(microseconds=1))
    return _created.isoformat(timespec="microseconds")


def _created_at(manifest: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(manifest["created"]).replace(tzinfo=timezone.utc)


def _together(strategy: Strategy, work: Callable[[], None] | None, path: Path, what: str) -> None:
    """Do this rank's part of the work; wait for all; raise on all if one failed."""
    problem = ""
    try:
        if work is not None:
            work()
    except Exception as error:  # of the file system, or of a library that wraps it
        problem = f"{type(error).__name__}: {error}"
    for rank, theirs in enumerate(strategy.gather_objects(problem, name=f"checkpoint {what}")):
        if theirs:
            raise CheckpointError(
                f"the checkpoint {path} could not be written on rank {rank}: {theirs}. Earlier checkpoints are intact. "
                "Make room or permission, or choose another folder with default_root_dir."
            )


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, after a check of every file's size and checksum. Runs no code from it.

    Raises:
        CheckpointError: there is none, it is damaged, or of another format.
    """
    global _created
    path = Path(path)
    manifest = verify(path)
    _created = max(_created, _created_at(manifest))
    model: dict[str, Any] = dict(load_tensors(path / _MODEL))
    training = _load(path / _TRAINING)
    model |= training.pop("extra_state", {})
    return Checkpoint(path, model, training, manifest)


def read_rank_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any] | None:
    """The state of one rank; None where the run had fewer ranks."""
    name = _rank_file(rank)
    return _load(checkpoint.path / name) if name in checkpoint.manifest["files"] else None


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, and return the manifest.

    Raises:
        CheckpointError: names the file, and what is wrong with it.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file: expected a checkpoint folder with a {_MANIFEST}. Weights of another kind are loaded with "
            "task.load_state_dict(torch.load(path, weights_only=True))."
        )
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text("utf-8"))
        if not isinstance(manifest, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("it holds no manifest")
    except FileNotFoundError:
        reason = f"it has no {_MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is no checkpoint: {reason}.{_neighbours(path)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST} can't be read: {error}.{_neighbours(path)}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}: read it with the version that "
            f"wrote it ({manifest.get('versions')})."
        )
    files = cast("dict[str, dict[str, Any]]", manifest.get("files", {}))
    for name in (_MODEL, _TRAINING, *files):
        expected = files.get(name)
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} can't be read: {error.strerror}.{_neighbours(path)}") from None
        if expected != found:
            raise CheckpointError(f"{path / name} is damaged: expected {expected}, found {found}.{_neighbours(path)}")
    return manifest


def newest_intact(folders: Iterable[Path]) -> Path | None:
    """The checkpoint in these folders that was made last and verifies; damaged ones are named in a warning.

    Made last, not of the highest step: a run that began anew in a used folder goes on with its own. Those that hold
    weights only are no candidates: nothing can go on from them.
    """
    found: list[tuple[datetime, int, Path]] = []
    for folder in folders:
        for entry in folder.iterdir() if folder.is_dir() else ():
            if is_checkpoint(entry) and not entry.is_symlink():
                try:
                    manifest = json.loads((entry / _MANIFEST).read_text("utf-8"))
                    if manifest.get("weights_only"):
                        continue
                    created, step = _created_at(manifest), int(manifest["step"])
                except (OSError, ValueError, KeyError, TypeError, AttributeError):
                    # By the file's time, so that it has its turn: verifying it says what is wrong.
                    created, step = datetime.fromtimestamp(entry.stat().st_mtime, timezone.utc), -1
                found.append((created, step, entry))
    for _, _, path in sorted(found, reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
            continue
        return path
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether the folder looks like a complete checkpoint."""
    return path.is_dir() and not path.name.startswith(".") and (path / _MANIFEST).is_file()


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: first out of sight, so that half a one is never found."""
    if is_checkpoint(path):
        gone = staging_of(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _load(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be loaded without running code from it: {error}") from None
    return state


def _synced(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # a folder can't be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir() if is_checkpoint(entry) and entry != path)
    return f" Beside it are: {', '.join(names[-8:])}." if names else ""
