"""`status.json` in the run's folder: how the run stands, or how it ended, for the program that started it.

torchrun turns every exit code but 0 into 1, so this is where a script can read why a run ended.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from ..strategies import process_groups
from ..strategies.first_cause import End, PeerError, has_timed_out, is_consequence, text_of
from .checkpoint.folder import CheckpointError
from .signals import Interrupted, Preempted

if TYPE_CHECKING:
    from .trainer import Trainer

STATUS_FILE = "status.json"


def write_status(trainer: Trainer, status: str, **more: Any) -> None:
    """Write the file, all of it or not at all; a folder that can't be written to ends no run.

    Args:
        trainer: of the run; one that writes nothing writes no status.
        status: running, completed, preempted, interrupted, failed, diverged, hung or oom.
        more: rank, place, reason, exit_code.
    """
    if not trainer.writes or not trainer.has_run_folder:
        return
    told = {
        "status": status,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "world_size": trainer.world_size,
        "restart": trainer.strategy.environment.restart,
        **more,
    }
    path = trainer.run_folder / STATUS_FILE
    # Several runs may have one folder, and a launcher may have left a rank behind.
    staging = path.with_name(f".{STATUS_FILE}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(json.dumps(told, indent=2) + "\n", "utf-8")
        os.replace(staging, path)
    except OSError as error:
        print(f"samestep: {path} could not be written: {error}", file=sys.stderr)


def place_of(trainer: Trainer) -> str:
    """What this rank is doing, as "training, epoch 0, step 7"."""
    states = {
        "sanity check": trainer.sanity_checking,
        "validation": trainer.validating,
        "training": trainer.training,
        "test": trainer.testing,
        "prediction": trainer.predicting,
    }
    doing = next((name for name, state in states.items() if state), trainer.running)
    return f"{doing}, epoch {trainer.current_epoch}, step {trainer.global_step}"


def end_with(trainer: Trainer, error: BaseException) -> BaseException:
    """Tell the peers and status.json of an error that ends the run on this rank; return what this rank raises.

    Where the error only says that another rank has ended, that is a PeerError with what the other one told.
    """
    if is_consequence(error):
        error = _dead_worker() or error
    rank = trainer.global_rank
    if isinstance(error, CheckpointError) and error.rank is not None:
        rank = error.rank
    mine = End(rank, status_of(error), _reason(error), place_of(trainer), _exit_code(error))
    if isinstance(error, Preempted) and error.agreed:
        first = mine if trainer.is_global_zero else None
    elif trainer.world_size == 1:
        first = mine
    elif is_consequence(error):
        watch = trainer.hang_watch
        if has_timed_out(error) and watch is not None and watch.hang is not None:  # it knows who did not come, and why
            process_groups.tell_end(End(watch.hang.rank, "hung", watch.hang.headline))
        told = process_groups.end_of_peers(error, in_haste=lambda: trainer.signals.is_being_ended)
        first = told or process_groups.tell_end(mine)
    else:
        first = process_groups.tell_end(mine)
    if first is None:
        return error
    if first.teller in (None, trainer.global_rank) and trainer.running == "fit":
        write_status(
            trainer, first.status, rank=first.rank, place=first.place, reason=first.reason, exit_code=first.exit_code
        )
    if first.rank == trainer.global_rank or not (is_consequence(error) or isinstance(error, Preempted)):
        return error
    place = f" in {first.place}" if first.place else ""
    text = f"rank {first.rank} ended the run{place}: {first.reason}. Rank {trainer.global_rank} had to end with it"
    if first.status in (Preempted.status, Interrupted.status):
        kind = Preempted if first.status == Preempted.status else Interrupted
        return kind(0, text)
    return PeerError(f"{text}.")


def _dead_worker() -> RuntimeError | None:
    """What torch says of a worker of this rank's loaders that has died, if it has not said so yet."""
    try:
        torch._C._error_if_any_worker_fails()  # pyright: ignore
    except RuntimeError as error:
        return error
    return None


def status_of(error: BaseException) -> str:
    """The word for what happened."""
    if isinstance(error, Preempted):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.status
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text_of(error):
        return "oom"
    return "diverged" if isinstance(error, FloatingPointError) else "failed"


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error, Preempted):
        return f"the program called sys.exit({error.code!r})"
    text = text_of(error).strip()
    if isinstance(error, Preempted):
        return text
    if not text:
        return type(error).__name__
    lines = text.splitlines()
    if "Original Traceback" in text:  # of a loader's worker, whose own error stands last
        return f"{lines[-1]} (in a worker of a DataLoader)"
    return f"{type(error).__name__}: {lines[0]}"


def _exit_code(error: BaseException) -> int:
    """What Python leaves with when nobody catches the error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    return Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
