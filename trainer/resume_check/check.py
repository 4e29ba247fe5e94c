"""The check: start the program again and again, and compare."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.folder import newest_intact
from .compare import Difference, first_difference, read_notes
from .probe import PLACES, Plan

Start = Callable[[Path, Path], int]
"""Starts the program with the plan in a file, its output going into another; returns its exit status when it is over."""


class ProgramError(RuntimeError):
    """The program ended by itself, before it was done or killed. The message holds the end of its output."""


@dataclass
class Report:
    """What came of it."""

    steps: int = 0
    """Optimizer steps of the uninterrupted run."""
    ranks: int = 0
    kills: int = 0
    """How often it was killed and resumed."""
    values: int = 0
    """Values compared, over all ranks and starts."""
    difference: Difference | None = None
    """The first that differs; None: the run resumes exactly."""
    control: Difference | None = None
    """Where something differs: what differs in a run that begins at the beginning, too, without being killed."""
    log: list[str] = field(default_factory=list[str])
    """A line for each start."""

    @property
    def exact(self) -> bool:
        """Whether every bit was equal."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return (
                f"Resuming is exact: {self.values} values of {self.steps} steps on {self.ranks} "
                f"rank{'s' * (self.ranks > 1)} (batches, losses, random numbers, parameters, buffers, optimizers, schedulers, "
                f"metrics) are equal bit by bit, killed {self.kills} time{'s' * (self.kills > 1)}."
            )
        lines = ["Resuming is NOT exact.", f"First difference: {_described(self.difference)}"]
        if self.control is None:
            lines += [
                "Started anew without being killed, the program repeats itself: what differs is lost in resuming.",
                _advice(self.difference.name),
            ]
        else:
            lines += [
                f"But the program does not repeat itself without being killed, either: {_described(self.control)}",
                "Seed what makes its data and weights; use deterministic kernels (torch.use_deterministic_algorithms); then "
                "check again.",
            ]
        return "\n".join(lines)


def check_resume(
    start: Start, folder: Path, *, steps: int, kills: int, seed: int, save_every: int, say: Callable[[str], None]
) -> Report:
    """Run uninterrupted, then killed and resumed, and compare.

    Args:
        start: starts the program.
        folder: empty; for checkpoints and notes.
        steps: optimizer steps of the run.
        kills: how often to kill it, each time in a later step.
        seed: chooses the steps, ranks and hooks in which it dies.
        save_every: steps from one checkpoint to the next.
        say: gets a line for each start.

    Raises:
        ProgramError: the program ended by itself, or never trained.
    """
    report = Report()

    def tell(line: str) -> None:
        report.log.append(line)
        say(line)

    whole = Plan(str(folder), "uninterrupted", steps, save_every=save_every)
    took = _run(start, whole, report, must_be_done=True)
    first = next(note["step"] for note in read_notes(whole.notes)[0] if note["kind"] == "start")
    report.ranks = len(read_notes(whole.notes))
    until = max(note["step"] for note in read_notes(whole.notes)[0] if note["kind"] == "done")
    report.steps = until - first
    tell(f"uninterrupted: {report.steps} steps on {report.ranks} rank{'s' * (report.ranks > 1)} ({took:.1f} s)")

    numbers = random.Random(seed)
    at = sorted(numbers.sample(range(first, until), min(kills, report.steps)))
    for index, step in enumerate([*at, None]):
        plan = Plan(
            str(folder), f"start-{index + 1}", steps, until, str(newest_intact([folder / "checkpoints"])), save_every,
            numbers.randrange(report.ranks), step, numbers.choice(PLACES),
        )  # fmt: skip
        took = _run(start, plan, report, must_be_done=step is None)
        notes = read_notes(plan.notes)
        resumed_at = notes[0][0]["step"]
        killed = next((note for note in notes[plan.kill_rank] if note["kind"] == "killed"), None)
        end = f"to the end, step {until}"
        if killed is not None:
            report.kills += 1
            end = f"killed at step {killed['step']}: rank {plan.kill_rank}, in {killed['hook']}"
        tell(f"resumed at step {resumed_at}, {end} ({took:.1f} s)")
        report.difference = first_difference(whole.notes, plan.notes)
        if report.difference is not None:
            break
        report.values += sum(len(note.get("values", ())) for each in notes.values() for note in each)
    if report.difference is not None:
        control = Plan(str(folder), "control", steps, until, str(folder / "checkpoints" / "start"), save_every)
        took = _run(start, control, report, must_be_done=True)
        report.control = first_difference(whole.notes, control.notes)
        tell(f"begun again, not killed ({took:.1f} s)")
    return report


def _run(start: Start, plan: Plan, report: Report, *, must_be_done: bool) -> float:
    folder = Path(plan.folder)
    plan_file, log = folder / f"{plan.start}.json", folder / f"{plan.start}.log"
    plan.write(plan_file)
    began = time.monotonic()
    status = start(plan_file, log)
    kinds = (
        {note["kind"] for notes in read_notes(plan.notes).values() for note in notes}
        if plan.notes.exists()
        else set[str]()
    )
    if "killed" in kinds or ("done" in kinds and status == 0):
        return time.monotonic() - began
    told = log.read_text("utf-8", errors="replace").strip() if log.exists() else ""
    tail = "\n".join(told.splitlines()[-25:])
    what = (
        "trained with no samestep.trainer.Trainer" if status == 0 and not kinds else f"ended with exit status {status}"
    )
    raise ProgramError(f"the program {what} in the start {plan.start!r}:\n{tail or '(it printed nothing)'}")


def _described(difference: Difference) -> str:
    others = f"; {difference.others} more at this place" if difference.others else ""
    return (
        f"step {difference.step}, rank {difference.rank} (epoch {difference.epoch}, batch {difference.batch_idx}), resumed at "
        f"step {difference.resumed_at}: {difference.name}: {difference.detail}{others}."
    )


def _advice(name: str) -> str:
    """What to look for, by what differs first: everything before it was equal."""
    if name == "the batch":
        return (
            "The samples differ, or what the dataset does to them. Look for a dataset or collate function that draws random "
            "numbers or counts, for a loader that is no DataLoader, and for an IterableDataset without a state."
        )
    if name.startswith("the random numbers"):
        return "Batches were equal so far. Look for code that draws in a hook that runs more often or less often when resuming."
    if name == "the loss":
        return (
            "Batch, random numbers and parameters before it are equal, so the loss depends on something that no checkpoint "
            "holds: a counter, a cache or a torch.Generator of the task. Make it a buffer (register_buffer), or keep it with "
            "on_save_checkpoint and on_load_checkpoint."
        )
    if name.startswith("metric"):
        return "Look for values that a callback or the task collects by itself: log them, or keep them with on_save_checkpoint."
    return (
        "The loss was equal. Look for state of an optimizer, a hook or a callback of your own that no checkpoint holds, and for "
        "what changes parameters outside of the optimizer."
    )


def verify_resume(
    train: Callable[[], None],
    *,
    processes: int = 1,
    steps: int = 20,
    kills: int = 3,
    seed: int = 0,
    save_every: int = 3,
    folder: Path | None = None,
) -> Report:
    """Check that what a function trains resumes exactly: for tests and notebooks. The command is `samestep verify-resume`.

    Args:
        train: defined at the top of a module; builds a Trainer and calls `fit`. It is called in new processes.
        processes: ranks, 1 or more.
        steps: optimizer steps of the run.
        kills: how often it is killed and resumed.
        seed: chooses where.
        save_every: steps from one checkpoint to the next.
        folder: for checkpoints and notes; default: a temporary one.

    Raises:
        ProgramError: the function raised, or trained nothing.
    """
    from .launching import function_starter

    with tempfile.TemporaryDirectory(prefix="samestep-resume-") as temporary:
        start = function_starter(train, processes)
        where = Path(temporary) if folder is None else folder
        return check_resume(
            start, where, steps=steps, kills=kills, seed=seed, save_every=save_every, say=lambda _: None
        )
