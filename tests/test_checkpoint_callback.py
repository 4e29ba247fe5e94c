"""ModelCheckpoint: what is saved when, what is kept, and that all ranks know it."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import CheckpointError, Task
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


class Scored(ScalarWeight):
    """Logs given scores, one for each validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.trainer.progress.validations])


def ones(samples: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.is_symlink())


def train(callback: ModelCheckpoint, scores: list[float], **options: Any) -> Any:
    trainer = quiet_trainer(
        max_epochs=len(scores), num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[callback], **options
    )
    trainer.fit(Scored(scores), ones(), ones(1))
    return trainer


@pytest.mark.parametrize(
    ("mode", "k", "scores", "kept"),
    [
        ("max", 1, [1.0, 3.0, 2.0], [1]),
        ("max", 2, [1.0, 3.0, 2.0], [1, 2]),
        ("min", 1, [3.0, 1.0, 2.0], [1]),
        ("min", 2, [3.0, 1.0, 2.0, 1.0], [1, 3]),
        ("min", 1, [float("nan"), 5.0, float("nan")], [1]),
        ("max", 1, [float("nan"), -5.0, float("nan")], [1]),
        ("max", 2, [float("nan"), 1.0, 2.0], [1, 2]),
        ("min", -1, [1.0, 2.0, 3.0], [0, 1, 2]),
        ("min", 0, [1.0, 2.0], []),
        ("max", 1, [2.0, 2.0], [0]),
        ("min", 3, [float("inf"), 1.0], [0, 1]),
    ],
)
def test_the_best_are_kept(mode: str, k: int, scores: list[float], kept: list[int], tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path / "c", "e{epoch}", "score", mode=mode, save_top_k=k, auto_insert_metric_name=False
    )
    train(callback, scores)
    found = names(tmp_path / "c") if kept else []
    assert found == [f"e{epoch}" for epoch in kept]
    assert {Path(path).name for path in callback.kept} == set(found)
    if kept:
        best = (max if mode == "max" else min)([scores[epoch] for epoch in kept], key=lambda s: (s != s, s))
        assert callback.best_model_score == best
        assert (tmp_path / "c" / "best").resolve() == Path(callback.best_model_path).resolve()


def test_retention_goes_by_number_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "c" / "step-00000001"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    callback = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    trainer = train(callback, [0.0] * 3)
    assert trainer.global_step == 12
    assert names(tmp_path / "c") == ["step-00000001", "step-00000012"]
    assert (foreign / "notes.txt").read_text() == "mine"


def test_the_checkpoint_resumed_from_is_never_removed(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "c")
    train(first, [0.0])
    again = ModelCheckpoint(tmp_path / "c")
    trainer = quiet_trainer(max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[again])
    trainer.fit(Scored([0.0] * 3), ones(), ones(1), ckpt_path=first.best_model_path)
    assert names(tmp_path / "c") == ["step-00000004", "step-00000012"]


def test_save_last_keeps_the_newest_beside_the_best(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{step}", "score", mode="max", save_last=True)
    trainer = train(callback, [3.0, 1.0, 2.0])
    assert names(tmp_path / "c") == ["step=12", "step=4"]
    assert (tmp_path / "c" / "last").resolve().name == "step=12"
    assert (tmp_path / "c" / "best").resolve().name == "step=4"
    task = Scored([0.0] * 4)
    trainer.validate(task, ones(1), ckpt_path="best", verbose=False)
    assert task.w == -3
    trainer.validate(task, ones(1), ckpt_path="last", verbose=False)
    assert task.w == -11


def test_names_with_metrics(tmp_path: Path) -> None:
    class Slashed(Scored):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/score", self.scores[self.trainer.progress.validations])

    callback = ModelCheckpoint(tmp_path / "c", "{epoch:02d}-{val/score:.2f}", save_top_k=-1)
    trainer = quiet_trainer(max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(Slashed([0.5, 0.25]), ones(), ones(1))
    assert names(tmp_path / "c") == ["epoch=00-val_score=0.50", "epoch=01-val_score=0.25"]
    again = ModelCheckpoint(tmp_path / "c", "{epoch:02d}-{val/score:.2f}", save_top_k=-1)
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[again]).fit(
        Slashed([0.5]), ones(), ones(1)
    )
    assert "epoch=00-val_score=0.50-v1" in names(tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_n_train_steps": 2}, [2, 4, 6, 8]),
        ({"every_n_train_steps": 3}, [3, 6]),
        ({"every_n_epochs": 2}, [8]),
        ({}, [4, 8]),
    ],
)
def test_when_it_saves(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", save_top_k=-1, **options)
    train(callback, [0.0, 0.0])
    assert names(tmp_path / "c") == [f"step-{step:08d}" for step in steps]


def test_validation_comes_before_a_checkpoint_due_at_the_same_step(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{step}-{score}", save_top_k=-1, every_n_train_steps=2)
    trainer = quiet_trainer(
        max_epochs=1, num_sanity_val_steps=0, val_check_interval=2, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(Scored([7.0, 9.0]), ones(), ones(1))
    assert names(tmp_path / "c") == ["step=2-score=7.0", "step=4-score=9.0"]


def test_epochs_without_validation_are_not_judged_by_an_old_value(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{epoch}", "score", save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=4, num_sanity_val_steps=0, check_val_every_n_epoch=2, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(Scored([7.0, 9.0]), ones(), ones(1))
    assert names(tmp_path / "c") == ["epoch=1", "epoch=3"]


def time_interval(folder: str) -> tuple[list[str], int]:
    import time

    class Slow(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.02 * (1 + self.global_rank))  # clocks that don't agree
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(folder, train_time_interval=timedelta(seconds=0.5), save_top_k=-1)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(Slow(), ones(100 * trainer.world_size))
    return sorted(callback.kept), trainer.global_step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_time_interval_is_decided_once_for_all_ranks(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(time_interval, ranks, str(tmp_path / "c"))
    assert all(result == results[0] for result in results)
    assert results[0][1] == 100
    assert len(results[0][0]) >= 1
    assert names(tmp_path / "c") == [Path(path).name for path in results[0][0]]


# --- several ranks ---------------------------------------------------------------------------


def fit_and_look(folder: str) -> dict[str, Any]:
    callback = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2)
    trainer = quiet_trainer(max_epochs=3, precision=64, enable_checkpointing=True, callbacks=[callback], seed=1)
    task = Regression()
    trainer.fit(task, loader(32, 4), loader(9, 2))
    path = callback.best_model_path
    again = Regression().double()
    from samestep.trainer.checkpoint import read_checkpoint

    again.load_state_dict(read_checkpoint(callback.last_path).model)
    return {
        "path": path,
        "files": sorted(os.listdir(path)),
        "manifest": json.loads((Path(path) / "manifest.json").read_text()),
        "equal": torch.equal(parameters_of(again), parameters_of(task)),
        "kept": callback.kept,
    }


def test_one_writer_and_every_rank_finds_the_file_when_fit_returns(tmp_path: Path) -> None:
    results = run_ranks(fit_and_look, 2, str(tmp_path / "c"))
    assert results[0] == results[1]
    assert results[0]["files"] == [
        "manifest.json",
        "model.safetensors",
        "rank-00000.pt",
        "rank-00001.pt",
        "training.pt",
    ]
    assert results[0]["equal"]
    manifest = results[0]["manifest"]
    assert manifest["world_size"] == 2
    assert manifest["metrics"]["val/loss"] == results[0]["kept"][results[0]["path"]]
    assert set(manifest["files"]) == set(results[0]["files"]) - {"manifest.json"}


def save_where_no_one_can(folder: str) -> None:
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder)])
    trainer.fit(ScalarWeight(), ones())


def test_a_folder_that_can_not_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in errors_of_ranks(save_where_no_one_can, 2, str(tmp_path / "file" / "c")):
        assert "CheckpointError" in error
        assert "could not be written on rank 0" in error


# --- format ----------------------------------------------------------------------------------


class Tied(Task):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("view", torch.arange(12.0).reshape(3, 4)[:, 1])


def test_tied_weights_and_views_are_stored_once_and_come_back(tmp_path: Path) -> None:
    from samestep.trainer.checkpoint.weights import load_tensors, save_tensors

    state = Tied().state_dict()
    save_tensors(state, tmp_path / "w.safetensors")
    loaded = load_tensors(tmp_path / "w.safetensors")
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
    assert (tmp_path / "w.safetensors").stat().st_size < 500


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class WithPath(ModelCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {"folder": tmp_path}

    with pytest.raises(
        TypeError, match=r"checkpoint\['callbacks'\]\[.*\]\['folder'\] is a pathlib\.\w+, which a checkpoint"
    ):
        train(WithPath(tmp_path / "c"), [0.0])
    assert os.listdir(tmp_path / "c") == []


def test_hyperparameters_come_back(tmp_path: Path) -> None:
    class Configured(ScalarWeight):
        def __init__(self, lr: float, sizes: list[int], name: str = "x", **extra: Any) -> None:
            super().__init__(lr)
            self.save_hyperparameters(ignore="name")
            self.sizes = sizes

    callback = ModelCheckpoint(tmp_path / "c")
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[callback])
    task = Configured(0.5, [1, 2], depth=3)
    trainer.fit(task, ones())
    again = Configured.load_from_checkpoint(callback.best_model_path)
    assert again.hparams == {"lr": 0.5, "sizes": [1, 2], "depth": 3}
    assert again.hparams.lr == 0.5
    assert again.w == task.w
    assert Configured.load_from_checkpoint(callback.best_model_path, lr=2.0).lr == 2.0
    with pytest.raises(TypeError, match="numbers, strings"):
        Configured(0.5, [object()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"can't be built from the hyperparameters.*more"):
        type("Other", (Configured,), {"__init__": lambda self, more: None}).load_from_checkpoint(
            callback.best_model_path
        )


def test_weights_only_checkpoints_are_for_loading(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", save_weights_only=True)
    trainer = train(callback, [0.0])
    assert Scored.load_from_checkpoint(callback.best_model_path, scores=[0.0]).w == trainer.task.w
    with pytest.raises(CheckpointError, match="holds weights only"):
        quiet_trainer().fit(Scored([0.0]), ones(), ones(1), ckpt_path=callback.best_model_path)
