"""Reading a checkpoint: checked file by file, and without running code from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import load_state
from .folder import MODEL, TRAINING, CheckpointError, note_created, rank_file, verify
from .migrations import migrated
from .weights import load_tensors


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


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, after a check of every file's size and checksum. Runs no code from it.

    Raises:
        CheckpointError: there is none, it is damaged, or of a format that this version does not know.
    """
    path = Path(path)
    manifest = verify(path)
    note_created(manifest)
    try:
        tensors: dict[str, Any] = dict(load_tensors(path / MODEL))
    except Exception as error:
        raise CheckpointError(f"{path / MODEL} can't be loaded as safetensors: {error}") from None
    model = migrated(manifest["format"], MODEL, tensors)
    training = migrated(manifest["format"], TRAINING, load_state(path / TRAINING))
    model |= training.pop("extra_state", {})
    return Checkpoint(path, model, training, manifest)


def read_rank_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any] | None:
    """The state of one rank; None where the run had fewer ranks."""
    name, manifest = rank_file(rank), checkpoint.manifest
    return migrated(manifest["format"], name, load_state(checkpoint.path / name)) if name in manifest["files"] else None
