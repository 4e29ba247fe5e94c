"""One run folder, one event file, no step twice."""

from __future__ import annotations

import json
import os
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
    assert sorted(os.listdir(folder)) == ["checkpoints", "metrics.jsonl", "tensorboard"]
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
