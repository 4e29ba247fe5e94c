"""A checkpoint's folder: complete or not there, and checked when it is read. Needs no torch.

model.safetensors   the task's weights, under its own names
training.pt         optimizers, schedulers, progress, callbacks, hyperparameters
rank-00000.pt …     what differs from rank to rank: random numbers
manifest.json       written last: versions, step, metrics, size and checksum of each file, and one of its own
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

from .migrations import FORMAT, MIGRATIONS
from .staging import PART, put_back, put_back_all, staging_of

MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"


def rank_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.pt"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, read, or trusted. The message names the file and says what to do."""

    rank: int | None = None
    """The rank on which it came about, where all ranks raise it."""


# --- time ------------------------------------------------------------------------------------

# Of the newest checkpoint that this process wrote or read.
_created = datetime.min.replace(tzinfo=timezone.utc)


def now() -> str:
    """The time in UTC, later than that of every checkpoint written or read before, even where the clock was put back."""
    global _created
    _created = max(datetime.now(timezone.utc), _created + timedelta(microseconds=1))
    return _created.isoformat(timespec="microseconds")


def created_at(manifest: dict[str, Any]) -> datetime:
    """When the checkpoint was made."""
    return datetime.fromisoformat(manifest["created"]).replace(tzinfo=timezone.utc)


def note_created(manifest: dict[str, Any]) -> None:
    """Let what is written from here on be later than this checkpoint."""
    global _created
    _created = max(_created, created_at(manifest))


# --- the manifest ----------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; what it says of the other files is not checked.

    Raises:
        CheckpointError: there is none, it can't be read, or this version does not know its format.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file: expected a checkpoint folder with a {MANIFEST}. Weights of another kind are loaded with "
            "task.load_state_dict(torch.load(path, weights_only=True))."
        )
    put_back(path)
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text("utf-8"))
        if not isinstance(manifest, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("it holds no manifest")
    except FileNotFoundError:
        reason = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path} is no checkpoint: {reason}.{_neighbours(path)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} can't be read: {error}.{_neighbours(path)}") from None
    _check_format(path, manifest)
    if problem := _problem(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: {problem}.{_neighbours(path)}")
    return manifest


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the checksum of its own content."""
    return {**manifest, "sha256": _checksum(manifest)}


def _checksum(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# What all manifests hold. Those of earlier versions have no checksum of their own, and nothing else either.
_KEYS = frozenset(
    (
        "format",
        "created",
        "versions",
        "task",
        "step",
        "epoch",
        "world_size",
        "metrics",
        "weights_only",
        "finite",
        "files",
    )
)


def _problem(manifest: dict[str, Any]) -> str:
    """What shows that a manifest is not as it was written; empty: nothing does."""
    if "sha256" in manifest and manifest["sha256"] != _checksum(manifest):
        return "its own checksum differs"
    if "sha256" not in manifest and (unknown := sorted(manifest.keys() - _KEYS)):
        return f"it holds {', '.join(map(repr, unknown))}, which no manifest without a checksum does"
    try:
        created_at(manifest)
    except (KeyError, TypeError, ValueError):
        return f"its created is {manifest.get('created')!r}, expected a time"
    for name, least in (("step", 0), ("epoch", 0), ("world_size", 1)):
        value = manifest.get(name)
        if type(value) is not int or value < least:
            return f"its {name} is {value!r}, expected a whole number of {least} or more"
    files: Any = manifest.get("files")
    if not isinstance(files, dict) or not all(
        _is_fingerprint(value) for value in cast("dict[str, Any]", files).values()
    ):
        return "its files are not names with a size and a sha256 each"
    missing = next((name for name in map(rank_file, range(manifest["world_size"])) if name not in files), None)
    return f"it names no {missing}, but was written on {manifest['world_size']} ranks" if missing else ""


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("size")) is int and isinstance(value.get("sha256"), str)  # pyright: ignore


def _check_format(path: Path, manifest: dict[str, Any]) -> None:
    found = manifest.get("format")
    if found == FORMAT or found in MIGRATIONS:
        return
    if isinstance(found, int) and found > FORMAT:
        told = f"has format {found}, which is newer than this version of Samestep reads ({FORMAT}): install a newer one"
    else:
        told = f"has format {found!r}, this version of Samestep reads {FORMAT}: read it with the version that wrote it"
    raise CheckpointError(f"{path} {told} (it was written under {manifest.get('versions')}).")


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, and return the manifest.

    Raises:
        CheckpointError: names the first file that is not as it was written, and what is wrong with it.
    """
    manifest = read_manifest(path)
    for problem in damage(path, manifest):
        raise CheckpointError(f"{problem}.{_neighbours(path)}")
    return manifest


def damage(path: Path, manifest: dict[str, Any]) -> Iterable[str]:
    """What is wrong with the files of a checkpoint, one sentence for each file."""
    files = cast("dict[str, dict[str, Any]]", manifest["files"])
    for name in dict.fromkeys((MODEL, TRAINING, *files)):
        expected = files.get(name)
        if not PART.fullmatch(name):
            yield f"{path / MANIFEST} names {name!r}, which is no file of a checkpoint"
            continue
        try:
            found = fingerprint(path / name)
        except OSError as error:
            yield f"{path / name} can't be read: {error.strerror}"
            continue
        if expected is None:
            yield f"{path / MANIFEST} is damaged: it does not name {name}"
        elif expected["size"] != found["size"]:
            yield f"{path / name} is damaged: its size is {found['size']} bytes, expected {expected['size']}"
        elif expected != found:
            yield f"{path / name} is damaged: its checksum differs"


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


# --- folders of checkpoints ------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Whether the folder looks like a complete checkpoint."""
    return path.is_dir() and not path.name.startswith(".") and (path / MANIFEST).is_file()


def checkpoints_in(*folders: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints in these folders with their manifests, the one made last first; links to them are left out.

    Made last, not of the highest step: a run that began anew in a used folder goes on with its own. Where a manifest
    can't be read, it is empty, and the file's time takes the place of its own.
    """
    found: list[tuple[datetime, int, Path, dict[str, Any]]] = []
    for folder in folders:
        put_back_all(folder)
    for entry in (entry for folder in folders if folder.is_dir() for entry in folder.iterdir()):
        if is_checkpoint(entry) and not entry.is_symlink():
            manifest: dict[str, Any] = {}
            try:
                manifest = json.loads((entry / MANIFEST).read_text("utf-8"))
                created, step = created_at(manifest), int(manifest["step"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                manifest = {}
                created, step = datetime.fromtimestamp(entry.stat().st_mtime, timezone.utc), -1
            found.append((created, step, entry, manifest))
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(path, manifest) for _, _, path, manifest in found]


def newest_intact(folders: Iterable[Path], tell: Callable[[str], None] = warnings.warn) -> Path | None:
    """The checkpoint in these folders that was made last and verifies; `tell` is told which damaged ones are passed over.

    Those that hold weights only are no candidates: nothing can go on from them.
    """
    for path, manifest in checkpoints_in(*folders):
        if manifest.get("weights_only"):
            continue
        try:
            verify(path)
        except CheckpointError as error:
            tell(f"samestep: passed over: {error}")
            continue
        return path
    return None


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: first out of sight, so that half a one is never found."""
    if is_checkpoint(path):
        gone = staging_of(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def synced(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # a folder can't be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir() if is_checkpoint(entry) and entry != path)
    return f" Beside it are: {', '.join(names[-8:])}." if names else ""
