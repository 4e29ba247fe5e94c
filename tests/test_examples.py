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


def start_example(name: str, ranks: int, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an example in the present folder."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": tempfile.mkdtemp(dir=os.getcwd()), **environment}
    return subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / name), "trainer.accelerator=cpu", *overrides],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def run_example(name: str, ranks: int, *overrides: str) -> str:
    """Run an example in the present folder to its good end, and return what it printed."""
    done = start_example(name, ranks, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def value_of(name: str, printed: str) -> float:
    """The number behind a name at the start of a line."""
    return next(float(line.split()[1]) for line in printed.splitlines() if line.split()[:1] == [name])


def line_of(name: str, printed: str) -> str:
    """What follows a name at the start of a line."""
    return next(line.split(None, 1)[1] for line in printed.splitlines() if line.split()[:1] == [name])


def saw(rank: int, printed: str) -> tuple[int, int, str]:
    """What uneven_join.py tells of a rank: batches, images, and the digest of its weights."""
    words = next(line for line in printed.splitlines() if line.startswith(f"rank {rank} ")).split()
    return int(words[2]), int(words[4]), words[7]


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


def test_uneven_join_sees_every_image_and_ends_alike_on_both_ranks() -> None:
    printed = run_example("uneven_join.py", 2, "trainer.max_epochs=4")
    few, many = saw(0, printed), saw(1, printed)
    assert few[:2] == (4 * 25, 4 * 387)
    assert many[:2] == (4 * 66, 4 * 1051)
    assert few[1] + many[1] == 4 * 1438
    assert value_of("steps", printed) == many[0]
    assert few[2] == many[2]
    assert line_of("weights", printed) == "the same on all ranks"
    assert value_of("val/acc", printed) > 0.9


def test_uneven_join_can_stop_with_the_shorter_rank() -> None:
    printed = run_example("uneven_join.py", 1, "trainer.devices=2", "uneven_inputs=stop", "trainer.max_epochs=2")
    few, many = saw(0, printed), saw(1, printed)
    assert few[:2] == (2 * 25, 2 * 387)
    assert many[0] == value_of("steps", printed) == few[0]
    assert few[2] == many[2]


def test_uneven_join_can_refuse_and_runs_on_one_rank() -> None:
    done = start_example("uneven_join.py", 1, "trainer.devices=2", "uneven_inputs=error")
    assert done.returncode == 1
    assert "rank 0: 25, rank 1: 66 batches" in done.stderr.splitlines()[-1]
    printed = run_example("uneven_join.py", 1, "trainer.max_epochs=2")
    assert saw(0, printed)[:2] == (2 * 90, 2 * 1438)


@pytest.mark.parametrize("options", [[], ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5"]])
def test_custom_strategy_trains_what_ddp_trains(options: list[str]) -> None:
    printed = run_example("custom_strategy.py", 2, "trainer.max_epochs=3", *options)
    assert value_of("difference", printed) <= 1e-12
    assert value_of("messages", printed) == 1
    assert value_of("val/acc", printed) > 0.85
    assert 10 < value_of("noise_scale", printed) < 1000


def test_custom_strategy_on_one_rank() -> None:
    printed = run_example("custom_strategy.py", 1, "trainer.max_epochs=1")
    assert value_of("difference", printed) <= 1e-12
    assert line_of("noise_scale", printed).startswith("nan")  # needs gradients of two kinds


@pytest.mark.parametrize("ranks", [1, 2])
def test_gan_draws_digits(ranks: int, tmp_path: Path) -> None:
    from PIL import Image

    printed = run_example("gan.py", ranks, f"trainer.max_epochs={10 * ranks}", "sheet_every=5")
    assert value_of("real", printed) < 1
    assert value_of("distance", printed) < 15 < 40 < value_of("untrained", printed)
    assert value_of("digits", printed) >= 7

    sheet = tmp_path / line_of("samples", printed)
    with Image.open(sheet) as image:
        assert image.size == (600, 600)
    assert len(list((sheet.parent / "tensorboard").glob("events.*"))) == 1


SMALL_GPT = [
    "trainer.precision=64-true", "layers=1", "width=16", "heads=2", "context=32", "train_pieces=192", "val_pieces=50",
    "trainer.log_every_n_steps=1", "save_every=5",
]  # fmt: skip


def test_char_gpt_is_the_same_on_one_rank_and_two_and_goes_on(tmp_path: Path) -> None:
    """In float64: bits per character, over all characters of the validation, and every letter that it writes."""
    one = run_example("char_gpt.py", 1, *SMALL_GPT, "batch_size=8")
    two = run_example("char_gpt.py", 2, *SMALL_GPT, "batch_size=4", "trainer.default_root_dir=two")
    assert value_of("val/bits", one) == pytest.approx(value_of("val/bits", two), abs=1e-8)
    written = one.partition("what it writes:")[2]
    assert written == two.partition("what it writes:")[2]
    assert len(written) > 20
    assert two.count("what it writes:") == two.count("by their frequencies alone") == 1  # rank 0 only
    assert "2 ranks × micro-batch 4 × 2 accumulated = 16 samples" in two
    assert "0.004 at its highest (step 2)" in two

    again = run_example("char_gpt.py", 2, *SMALL_GPT, "batch_size=4", "trainer.default_root_dir=two")
    assert "resuming from two/checkpoints/step-00000010 (epoch 0, step 10)" in again
    assert line_of("val/bits", again) == line_of("val/bits", two)
    assert again.partition("what it writes:")[2] == written


def test_char_gpt_learns_more_than_the_frequencies_of_characters() -> None:
    printed = run_example("char_gpt.py", 1, "trainer.accumulate_grad_batches=1", "context=64", "train_pieces=1200")
    frequencies = float(line_of("val/bits", printed).split("; ")[1].split()[0])
    assert value_of("val/bits", printed) < frequencies - 0.5


def test_resnet_learns_the_painted_shapes() -> None:
    pytest.importorskip("torchvision", reason="no torchvision for this torch", exc_type=(ImportError, RuntimeError))
    printed = run_example("resnet_imagefolder.py", 2, "model=resnet18", "trainer.max_epochs=2")
    assert value_of("val/acc", printed) >= 0.7
    assert printed.count("val/acc  ") == 1


def test_resnet_says_in_one_line_that_torchvision_is_missing(tmp_path: Path) -> None:
    """As it is where torchvision was built for another torch: it is there, and raises when it is imported."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    done = start_example("resnet_imagefolder.py", 1, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install torchvision" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
