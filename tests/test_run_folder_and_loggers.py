"""One run folder, one event file, no step twice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_ranks import run_ranks
from samestep.callbacks import JSONLLogger, LearningRateMonitor, ModelCheckpoint, TensorBoardLogger
from tasks import Regression, loader, quiet_trainer


def events_in(folder: Path) -> dict[str, list[int]]:
    """The steps of each scalar in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [event.step for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def train(folder: str | None, epochs: int = 2, ckpt_path: str | None = None) -> dict[str, Any]:
    jsonl = JSONLLogger()
    keep = ModelCheckpoint(save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=epochs, precision=64, log_every_n_steps=2, default_root_dir=folder, enable_checkpointing=True, seed=1,
        callbacks=[TensorBoardLogger(), jsonl, keep, LearningRateMonitor()],
    )  # fmt: skip
    trainer.fit(Regression(), loader(16 * trainer.world_size, 4), loader(8, 4), ckpt_path=ckpt_path)
    return {"folder": str(trainer.run_folder), "log": trainer.log_dir, "kept": list(keep.kept)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_folder_is_decided_once_and_holds_one_event_file(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(train_in, ranks, str(tmp_path), None)
    assert len({result["folder"] for result in results}) == 1
    folder = tmp_path / results[0]["folder"]
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("Regression-20")
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [folder.name]
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert sorted(os.listdir(folder)) == ["checkpoints", "metrics.jsonl", "status.json", "tensorboard"]
    steps = events_in(folder / "tensorboard")
    assert steps == {"train/loss": [2, 4, 6, 8], "val/loss": [4, 8], "lr-SGD": [2, 4, 6, 8]}


def train_in(folder: str, *args: Any) -> dict[str, Any]:
    os.chdir(folder)
    return train(*args)


def test_two_runs_in_one_second_have_folders_of_their_own() -> None:
    assert len({train(None)["folder"] for _ in range(3)}) == 3


def test_a_run_that_writes_nothing_makes_no_folder() -> None:
    quiet_trainer(max_epochs=1, precision=64).fit(Regression(), loader(8, 4))
    assert os.listdir() == []


def test_no_step_is_logged_twice_after_a_resume(tmp_path: Path) -> None:
    whole = train(str(tmp_path / "run"), 3)
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    train(str(tmp_path / "run"), 3, whole["kept"][0])  # again from step 4, in the same folder
    steps = events_in(tmp_path / "run" / "tensorboard")
    assert steps == {"train/loss": [2, 4, 6, 8, 10, 12], "val/loss": [4, 8, 12], "lr-SGD": [2, 4, 6, 8, 10, 12]}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = [(line["step"], name) for line in lines for name in line if name != "step"]
    assert len(keys) == len(set(keys))
    assert {line["step"] for line in lines} == {2, 4, 6, 8, 10, 12}


def test_a_line_that_was_torn_is_dropped_on_resume(tmp_path: Path) -> None:
    kept = train(str(tmp_path / "run"), 1)["kept"]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "tra')
    train(str(tmp_path / "run"), 2, kept[0])
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_values_that_json_has_not(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path / "m.jsonl")
    logger.log_metrics({"a": float("nan"), "b": float("inf"), "c": 1.5}, 3)
    logger.finalize("success")
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 3, "a": "nan", "b": "inf", "c": 1.5}


def test_the_writer_is_harmless_on_other_ranks() -> None:
    assert run_ranks(use_experiment, 2) == [True, False]


def use_experiment() -> bool:
    class Writes(Regression):
        def on_train_start(self) -> None:
            self.logger.experiment.add_text("hello", "world", 0)

    folder = Path("writes")
    trainer = quiet_trainer(max_epochs=1, precision=64, logger=TensorBoardLogger(folder, "name", 3))
    trainer.fit(Writes(), loader(16, 4))
    assert trainer.logger is not None
    assert trainer.logger.log_dir == str(folder / "name" / "version_3")
    return trainer.logger.is_writer


# --- another run in the same folder ----------------------------------------------------------


def steps_of_lines(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_run_that_begins_anew_puts_the_metrics_of_the_run_before_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for epochs in (3, 2, 1):
        train(str(folder), epochs)
    whole = {"train/loss": [2, 4], "val/loss": [4], "lr-SGD": [2, 4]}
    assert events_in(folder / "tensorboard") == whole
    assert events_in(folder / "tensorboard-2")["train/loss"] == [2, 4, 6, 8]
    assert events_in(folder / "tensorboard-1")["train/loss"] == [2, 4, 6, 8, 10, 12]
    assert max(steps_of_lines(folder / "metrics.jsonl")) == 4
    assert max(steps_of_lines(folder / "metrics-2.jsonl")) == 8
    assert max(steps_of_lines(folder / "metrics-1.jsonl")) == 12
    for entry in folder.glob("tensorboard*"):
        assert len(list(entry.iterdir())) == 1


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    kept = train(str(tmp_path / "run"), 1)["kept"]
    train(str(tmp_path / "run"), 2, kept[0])
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "metrics.jsonl", "status.json", "tensorboard"]


def test_a_validation_before_the_fit_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "old": 1.0}\n')
    jsonl, board = JSONLLogger(), TensorBoardLogger()
    trainer = quiet_trainer(
        max_epochs=1, precision=64, default_root_dir=tmp_path, log_every_n_steps=2, callbacks=[jsonl, board]
    )
    task = Regression()
    trainer.validate(task, loader(8, 4), verbose=False)
    trainer.fit(task, loader(16, 4), loader(8, 4))
    assert events_in(tmp_path / "tensorboard") == {"val/loss": [0, 4], "train/loss": [2, 4]}
    # The file was there before: what was added to it goes aside with it.
    assert steps_of_lines(tmp_path / "metrics-1.jsonl") == [7, 0]
    assert steps_of_lines(tmp_path / "metrics.jsonl") == [2, 4, 4]


class Configured(Regression):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_resumed_run_with_hyperparameters_loses_no_line_and_shows_no_step_twice(tmp_path: Path) -> None:
    def run(epochs: int, ckpt_path: str | None = None) -> list[str]:
        keep = ModelCheckpoint(save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=epochs, precision=64, seed=1, log_every_n_steps=2, default_root_dir=tmp_path,
            enable_checkpointing=True, callbacks=[keep, JSONLLogger(), TensorBoardLogger()],
        )  # fmt: skip
        trainer.fit(Configured(), loader(16, 4), ckpt_path=ckpt_path)
        return list(keep.kept)

    kept = run(3)
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    run(3, kept[0])
    assert events_in(tmp_path / "tensorboard") == {"train/loss": [2, 4, 6, 8, 10, 12]}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4, 6, 8, 10, 12]
    assert {"step": 0, "hyperparameters": {"width": 3}} in lines


# --- where the output is ---------------------------------------------------------------------


def test_the_end_of_a_fit_says_where_its_output_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path / "run"), 1)
    assert capsys.readouterr().out.splitlines()[-1] == f"output in {tmp_path / 'run'}"
    quiet_trainer(max_epochs=1, precision=64, default_root_dir=tmp_path / "run").fit(Regression(), loader(8, 4))
    assert "output" not in capsys.readouterr().out, "nothing was written"


RESTARTED = """
import os
from samestep.callbacks import ModelCheckpoint
from tasks import *
class Dies(ScalarWeight):
    def on_train_epoch_start(self):
        if self.current_epoch == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            self.trainer.wait_for_checkpoint()
            os._exit(3)
for kind in (ScalarWeight, Dies):
    trainer = quiet_trainer(max_epochs=3, enable_checkpointing=True)
    trainer.fit(kind(), DataLoader(torch.ones(4), 1), ckpt_path="auto")
"""


@pytest.mark.parametrize("arguments", [["--standalone"], ["--master-port=0"]])
def test_a_restart_of_the_same_job_finds_its_folder(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RESTARTED)
    if arguments[0].startswith("--master"):
        with socket.socket() as probe:
            probe.bind(("", 0))
            arguments = [f"--master-port={probe.getsockname()[1]}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, "--nproc-per-node=1", "--max-restarts=1",
         "--monitor-interval=0.1", "program.py"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(entry.name.partition("-20")[0] for entry in (tmp_path / "runs").iterdir()) == ["Dies", "ScalarWeight"]
    resumed = [line for line in done.stdout.splitlines() if line.startswith("resuming from runs/Dies-")]
    assert len(resumed) == 1
    assert resumed[0].endswith("(epoch 1, step 8)")
