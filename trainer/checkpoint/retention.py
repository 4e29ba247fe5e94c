"""Removing checkpoints that are kept no more, but not those that somebody may still need."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .folder import MANIFEST, created_at, is_checkpoint, remove_checkpoint


def remove_dropped(
    dropped: Sequence[str], staying: Iterable[str], monitor: str | None, resumed_from: str | os.PathLike[str] | None
) -> None:
    """Remove checkpoints that are kept no more.

    Left are the one that this run was resumed from; and, while nothing that stays is finite, the newest that is: a run
    that diverged can go on from there.

    Args:
        dropped: what is kept no more.
        staying: what stays beside them, the new one included.
        monitor: the metric by which they are kept: a checkpoint is finite if its weights and this value of it are.
        resumed_from: where this run began.
    """
    dropped = [path for path in dropped if is_checkpoint(Path(path))]
    left = [
        path for path in dropped if resumed_from is not None and Path(path).resolve() == Path(resumed_from).resolve()
    ]
    if not any(_finite_since(path, monitor) for path in (*staying, *left)):
        finite = {path: since for path in dropped if (since := _finite_since(path, monitor))}
        left += sorted(finite, key=finite.__getitem__)[-1:]
    for path in dropped:
        if path not in left:
            remove_checkpoint(Path(path))


def _finite_since(path: str, monitor: str | None) -> float | None:
    """When the checkpoint was made, as seconds since 1970, if it is finite."""
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text("utf-8"))
        value = manifest["metrics"].get(monitor, 0.0)
        finite = manifest.get("finite", True) and math.isfinite(value)
        return created_at(manifest).timestamp() if finite else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: nobody can go on from it
        return None
