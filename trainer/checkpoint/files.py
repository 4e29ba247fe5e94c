"""The files of a checkpoint that torch writes and reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import torch

from .folder import CheckpointError


class _TellsWhy:
    """A file for `torch.save`, whose own error says nothing of a full disk: what the system said is kept."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a state with torch.save, and sync it to the disk.

    Raises:
        OSError: the disk is full, or gone.
    """
    with open(path, "wb") as file:
        target = _TellsWhy(file)
        try:
            torch.save(state, target)  # type: ignore[arg-type]
        except RuntimeError:
            if target.problem is not None:
                raise target.problem from None
            raise
        file.flush()
        os.fsync(file.fileno())


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, to the CPU. Runs no code from the file.

    Raises:
        CheckpointError: the file holds something that could not be loaded without.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be loaded without running code from it: {error}") from None
    return state
