"""The folder of a run's output where no `default_root_dir` names one: new for each run, kept when torchrun restarts it."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from itertools import count
from pathlib import Path

# In the folder of a run under torchrun: which job made it, and as which of its runs.
_MARK = ".torchrun"

_runs = count()


def make_run_folder(name: str, *, again: bool) -> Path:
    """The folder `runs/<name>-<UTC time>`, made now; after a restart the one that this job made before. For rank 0.

    Args:
        name: of the task.
        again: the job has been started again.
    """
    mark = _job()
    if mark is not None:
        mark = f"{mark} {next(_runs)}"  # a program may build several Trainers: the first finds the first's folder
        former = _marked(mark) if again else None
        if former is not None:
            return former
    folder = _new_folder(name_of_run(name))
    if mark is not None:
        (folder / _MARK).write_text(mark, "utf-8")
    return folder


def name_of_run(name: str) -> Path:
    """The path of a run that begins now."""
    return Path("runs") / f"{name}-{datetime.now(timezone.utc).strftime('%Y-%m-%dT%H-%M-%SZ')}"


def _job() -> str | None:
    """What is the same for all restarts of a torchrun job, and for no other job; None: this is none."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    # Without --standalone or --rdzv-id every job is called "none": then its agent tells it, which starts the ranks.
    return f"{socket.gethostname()}/{os.getppid()}" if job == "none" else job


def _marked(mark: str) -> Path | None:
    found = [file for file in Path("runs").glob(f"*/{_MARK}") if file.read_text("utf-8") == mark]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def _new_folder(base: Path) -> Path:
    """Make a folder that nobody else has, even one who begins in this very moment."""
    folder, number = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        else:
            return folder
