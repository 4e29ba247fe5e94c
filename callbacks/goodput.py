"""Where the time of a run went, over all its restarts."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .callback import Callback
from .wording import counted

if TYPE_CHECKING:
    from ..trainer import Task, Trainer

_FILE = "goodput.json"
_PARTS = ("steps", "data", "evaluation", "saving", "startup", "other")
# Seconds between two writes of the ledger: what a kill can leave uncounted.
_PERIOD = 10.0


class Goodput(Callback):
    """Keeps a ledger of the run's time, says at the end what share of it went into steps, and writes `goodput.json`.

    The file lies in the run's folder and goes on when the run is resumed there. It holds, for each attempt, in seconds:
    `steps` (from a micro-batch's start to its end: forward, backward, update), `data` (waiting for the loader and the way
    to the device), `evaluation`, `saving` (the loop is blocked by a checkpoint), `startup` (until training begins), and
    `other` (hooks, logging, the ends of epochs). Over all attempts: `lost` is the time of steps that were done after the
    checkpoint from which the next attempt went on, and so had to be done again; `down` lies between two attempts.
    `goodput` is what is left of `steps`, as a share of all. `exposed_communication` is the part of `steps` in which the
    backward only waited for the reduction, as DDP measures it now and then; null where it does not.

    Rank 0 keeps it. It costs three short Python calls in a step. An attempt that is killed is counted up to at most ten
    seconds before.
    """

    def __init__(self) -> None:
        self.attempts: list[dict[str, Any]] = []
        """Those before, and this one."""
        self._now: dict[str, Any] = {}
        self._mark = self._written = self._saved = 0.0

    # --- the moments -----------------------------------------------------------------------

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """The clock starts."""
        if stage == "fit":
            self._now = {**dict.fromkeys(_PARTS, 0.0), "begun": time.time()}
            self._mark, self._saved = time.monotonic(), trainer.seconds_saving

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Take up the ledger of the attempts before, where the run goes on from a checkpoint."""
        self._count(trainer, "startup")
        goes_on = trainer.resumed_from is not None
        self.attempts = _read(trainer.run_folder / _FILE) if goes_on and trainer.is_global_zero else []
        self.attempts.append(self._now)
        self._now |= {"first_step": trainer.global_step, "last_step": trainer.global_step}
        self._write(trainer)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """The first batch of the epoch comes next."""
        self._count(trainer, "other")

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """A micro-batch has arrived."""
        self._count(trainer, "data")

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """It is done."""
        self._count(trainer, "steps")

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Write the ledger now and then."""
        self._count(trainer, "other")
        if self._mark - self._written > _PERIOD:
            self._write(trainer)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """An evaluation begins."""
        if not trainer.sanity_checking:
            self._count(trainer, "other")

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """It is over."""
        if not trainer.sanity_checking:
            self._count(trainer, "evaluation")

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """The ledger knows of all steps that the checkpoint holds. Which are lost shows when the next attempt begins."""
        if "first_step" in self._now:
            self._write(trainer)

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Keep what there is."""
        if "first_step" in self._now:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Sum up."""
        self._count(trainer, "other")
        communication = trainer.strategy.exposed_communication()
        if communication is not None:
            steps = trainer.global_step - self._now["first_step"]
            self._now["exposed_communication"] = min(communication * steps, self._now["steps"])
        self._write(trainer)
        trainer.print(f"goodput {describe(ledger(self.attempts))}")

    # --- the ledger ------------------------------------------------------------------------

    def _count(self, trainer: Trainer, part: str) -> None:
        """What has passed since the last moment belongs to this part, but for what went into saving."""
        now, saved = time.monotonic(), trainer.seconds_saving
        blocked, self._saved = saved - self._saved, saved
        self._now[part] += now - self._mark - blocked
        self._now["saving"] += blocked
        self._mark = now

    def _write(self, trainer: Trainer) -> None:
        self._written = self._mark
        self._now |= {"last_step": trainer.global_step, "ended": time.time()}
        if not trainer.is_global_zero:
            return
        path = trainer.run_folder / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{_FILE}.new")
        beside.write_text(json.dumps({**ledger(self.attempts), "attempts": self.attempts}, indent=1), encoding="utf-8")
        os.replace(beside, path)


def ledger(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum the attempts of a run up, in seconds; see `Goodput`."""
    total: dict[str, Any] = {part: sum(attempt[part] for attempt in attempts) for part in _PARTS}
    total |= {"lost": 0.0, "lost_steps": 0, "down": 0.0}
    for before, after in pairwise(attempts):
        done, again = before["last_step"] - before["first_step"], max(0, before["last_step"] - after["first_step"])
        if done:
            total["lost"] += before["steps"] * min(again, done) / done
        total["lost_steps"] += again
        total["down"] += max(0.0, after["begun"] - before["ended"])
    total["steps"] -= total["lost"]
    known = [attempt["exposed_communication"] for attempt in attempts if "exposed_communication" in attempt]
    total["exposed_communication"] = sum(known) if known else None
    total["total"] = sum(total[part] for part in (*_PARTS, "lost", "down"))
    total["goodput"] = total["steps"] / total["total"] if total["total"] else 0.0
    total["restarts"] = len(attempts) - 1
    total["written"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return total


def describe(total: dict[str, Any]) -> str:
    """One line: the goodput, and what the rest of the time went into, the most first."""
    rest = {part: total[part] / total["total"] for part in (*_PARTS[1:], "lost", "down")} if total["total"] else {}
    shares = [f"{part} {share:.1%}" for part, share in sorted(rest.items(), key=lambda item: -item[1]) if share >= 5e-4]
    lost = f"; {counted(total['lost_steps'], 'step')} done again after a restart" if total["lost_steps"] else ""
    exposed = total["exposed_communication"]
    waits = "communication not measured" if exposed is None else f"{exposed / total['total']:.1%} waiting for gradients"
    return f"{total['goodput']:.1%} of {total['total']:.0f} s ({waits}); {', '.join(shares) or 'nothing else'}{lost}"


def _read(path: Path) -> list[dict[str, Any]]:
    """The attempts of a ledger; none where there is no readable one."""
    try:
        attempts: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["attempts"]
    except (OSError, ValueError, KeyError):
        return []
    return attempts
