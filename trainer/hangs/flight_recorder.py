"""torch's flight recorder, where it is there: the last collectives that this process has begun."""

from __future__ import annotations

import contextlib
import faulthandler
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

_recorder: Any = torch._C._distributed_c10d  # pyright: ignore


class Collectives(NamedTuple):
    """Of this rank, in the default process group."""

    begun: int
    done: int


def collectives() -> Collectives | None:
    """Count them; None: the recorder can't say."""
    dump = getattr(_recorder, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    status = json.loads(dump(includeCollectives=False)).get("pg_status", {}).get("0")
    if status is None:
        return None
    return Collectives(int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))


def write_dump(folder: Path, rank: int) -> None:
    """Leave the stacks of all threads, and the recorder's trace, in a folder.

    `torchfrtrace --prefix flight-recorder- FOLDER`, which comes with torch, compares the traces of all ranks.
    """
    with contextlib.suppress(OSError):  # it is a help, and no reason to fail
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"stacks-{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if hasattr(_recorder, "_dump_fr_trace"):
            (folder / f"flight-recorder-{rank}").write_bytes(_recorder._dump_fr_trace())
