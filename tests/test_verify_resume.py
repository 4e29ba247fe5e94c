"""verify-resume: a right program passes, and in a wrong one the first thing that differs is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import verified_tasks
from run_ranks import RankError, run_ranks
from samestep.trainer.resume_check import Report, verify_resume
from samestep.trainer.resume_check.check import ProgramError, Start, check_resume
from samestep.trainer.resume_check.probe import VARIABLE
from test_launch import environment_of_tests

PROGRAM = """
import sys, verified_tasks
if __name__ == "__main__":
    getattr(verified_tasks, sys.argv[1])()
    print("behind the fit")
"""


def follow(name: str, plan: str) -> None:
    os.environ[VARIABLE] = plan
    getattr(verified_tasks, name)()


def starter(name: str, ranks: int) -> Start:
    """Starts a function on ranks that are forked with torch imported."""

    def start(plan: Path, log: Path) -> int:
        try:
            run_ranks(follow, ranks, name, str(plan))
        except RankError as error:
            log.write_text(str(error))
            ends = [line.partition(": ")[2] for line in str(error).splitlines() if line.startswith("rank ")]
            return int(ends != ["died with exit code 0"] * ranks)
        raise AssertionError("it went on behind the check")

    return start


def check(name: str, ranks: int, folder: Path, *, steps: int, kills: int, seed: int = 0) -> Report:
    start = starter(name, ranks)
    return check_resume(start, folder, steps=steps, kills=kills, seed=seed, save_every=3, say=print)


def test_a_right_task_passes(tmp_path: Path) -> None:
    report = check("right", 2, tmp_path, steps=14, kills=3)
    assert report.exact, report
    assert (report.steps, report.ranks, report.kills) == (14, 2, 3)
    assert report.values > 500
    assert "killed at step" in report.log[1]
    assert str(report).startswith("Resuming is exact")


@pytest.mark.parametrize(
    ("task", "ranks", "name", "told"),
    [
        ("counts", 1, "the loss", "a counter"),
        ("own_generator", 2, "the loss", "torch.Generator"),
        ("counts_reads", 1, "the batch", "dataset"),
        ("drifts", 1, "parameter net.0.bias", "outside of the optimizer"),
    ],
)
def test_what_no_checkpoint_holds_is_found_where_it_is_seen_first(
    task: str, ranks: int, name: str, told: str, tmp_path: Path
) -> None:
    report = check(task, ranks, tmp_path, steps=8, kills=2, seed=1)
    difference = report.difference
    assert difference is not None
    assert report.control is None
    assert difference.name == name
    assert difference.resumed_at <= difference.step
    assert difference.resumed_at > 0
    assert difference.rank == ranks - 1
    assert told in str(report)
    assert "repeats itself" in str(report)
    if name.startswith("parameter"):
        assert "max abs" in difference.detail
        assert "of 8 numbers" in difference.detail


def test_a_program_that_never_repeats_itself_is_told_from_one_that_loses_something(tmp_path: Path) -> None:
    report = check("chance", 1, tmp_path, steps=3, kills=1)
    assert report.control is not None
    assert "does not repeat itself" in str(report)


def test_a_program_that_fails_by_itself_is_no_difference(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"'uninterrupted'(.|\n)*OSError: the disk is gone"):
        check("fails", 1, tmp_path, steps=3, kills=1)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_function_is_checked_in_new_processes() -> None:
    report = verify_resume(verified_tasks.right, steps=3, kills=1)
    assert report.exact, report
    assert report.kills == 1


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    Path("program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "samestep.trainer", "verify-resume", *arguments],
        capture_output=True, text=True, timeout=400, env=environment_of_tests(),
    )  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_command_checks_an_unchanged_program_and_writes_nothing_beside_it() -> None:
    done = command("--steps", "4", "--kills", "1", "--devices", "2", "--", "program.py", "right")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Resuming is exact: ")
    assert [path.name for path in Path().iterdir() if not path.name.startswith(("__pycache__", "torchelastic"))] == [
        "program.py"
    ]


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_command_says_what_the_program_said_when_it_failed() -> None:
    done = command("--steps", "4", "--", "program.py", "fails")
    assert done.returncode == 2
    assert "OSError: the disk is gone" in done.stderr
    assert "expected a program" in command("--", "nothing.py").stderr
