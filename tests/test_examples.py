"""The examples run as their docstrings say: from plain Python, and under torchrun on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, ranks: int, *overrides: str) -> str:
    """Run an example in the present folder, and return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / name), "trainer.accelerator=cpu", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": tempfile.mkdtemp(dir=os.getcwd())}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def value_of(name: str, printed: str) -> float:
    """The number behind a name at the start of a line."""
    return next(float(line.split()[1]) for line in printed.splitlines() if line.split()[:1] == [name])


@pytest.mark.parametrize("ranks", [1, 2])
def test_custom_callback(ranks: int, tmp_path: Path) -> None:
    printed = run_example("custom_callback.py", ranks, "trainer.max_epochs=3")
    assert value_of("val/acc", printed) > 0.9
    assert 0.001 < value_of("update/net.0.weight", printed) < 0.1
    assert printed.count("val/acc") == 1  # rank 0 only

    lines = [json.loads(line) for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    logged = [line["step"] for line in lines if "update/net.2.weight" in line]
    assert logged == list(range(8, 3 * 64 // ranks + 1, 8))


def test_custom_callback_ends_a_run_that_is_lost() -> None:
    printed = run_example("custom_callback.py", 1, "learning_rate=300")
    assert "an update of net.0.weight was" in printed
    assert value_of("val/acc", printed) < 0.5


def test_digits_reaches_its_accuracy_on_two_ranks(tmp_path: Path) -> None:
    printed = run_example("digits.py", 2, "trainer.devices=2")
    assert value_of("val/acc", printed) >= 0.98
    assert sum(line.startswith("val/acc") for line in printed.splitlines()) == 1  # rank 0 only
    assert "2 ranks × micro-batch 32 × 1 accumulated = 64 samples" in printed

    best = next(line.split()[1] for line in printed.splitlines() if line.startswith("checkpoint"))
    folder = tmp_path / best
    assert folder.parent.parent.parent == tmp_path / "runs"
    sys.path.insert(0, str(EXAMPLES))
    from digits import Digits  # pyright: ignore[reportMissingImports]

    task = Digits.load_from_checkpoint(folder)
    assert task.hparams.learning_rate == 4e-3
    assert len(list((folder.parent.parent / "tensorboard").glob("events.*"))) == 1


def test_digits_on_one_rank_from_plain_python_and_with_overrides() -> None:
    printed = run_example("digits.py", 1, "trainer.max_epochs=2", "batch_size=64")
    assert value_of("val/acc", printed) >= 0.9
    assert "1 rank × micro-batch 64 × 1 accumulated = 64 samples" in printed
    assert "2 epochs: 46 steps in all" in printed
