"""What a checkpoint is judged by where its moment and its metric's moment are not the same."""

from __future__ import annotations

import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import EarlyStopping, ModelCheckpoint
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader


class Judged(ScalarWeight):
    """Logs the next of the given scores at each validation, and the step itself as a step value."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step_value", float(self.global_step + 1), on_step=True, on_epoch=False)
        self.log("epoch_value", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", self.scores[self.trainer.progress.validations])


def fit(callback: Any, scores: list[float], steps: int = 8, **options: Any) -> Any:
    trainer = quiet_trainer(
        **{"max_epochs": 1, "num_sanity_val_steps": 0, "enable_checkpointing": True, "callbacks": [callback], **options}
    )
    ranks = trainer.world_size
    trainer.fit(Judged(scores), DataLoader(torch.ones(steps * ranks), 1), DataLoader(torch.ones(ranks), 1))
    return trainer


def kept(callback: ModelCheckpoint) -> list[tuple[str, float]]:
    return [(Path(path).name, value) for path, value in callback.kept.items()]


def judge_between_validations(folder: str) -> list[tuple[str, float]]:
    callback = ModelCheckpoint(folder, "{step}", "val/score", save_top_k=-1, every_n_train_steps=2)
    fit(callback, [5.0, 3.0], val_check_interval=3)
    return kept(callback)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_between_validations_is_judged_by_the_last_one(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(judge_between_validations, ranks, str(tmp_path / "c")):
        assert found[1:] == [("step=4", 5.0), ("step=6", 3.0), ("step=8", 3.0)]
        assert found[0][0] == "step=2"
        assert math.isnan(found[0][1])


def test_what_is_saved_before_the_first_validation_is_kept_until_one_is_judged(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watches(Judged):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(sorted(entry.name for entry in tmp_path.glob("c/step*")))

    callback = ModelCheckpoint(tmp_path / "c", "{step}", "val/score", every_n_train_steps=1, asynchronous=False)
    trainer = quiet_trainer(
        max_epochs=1, num_sanity_val_steps=0, val_check_interval=3, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(Watches([5.0, 3.0]), DataLoader(torch.ones(6), 1), DataLoader(torch.ones(1), 1))
    # Without a value the newest is kept; step 3 is the first with one, and stays until step 6 is better.
    assert seen == [[], ["step=1"], ["step=2"], ["step=3"], ["step=3"], ["step=3"]]
    assert kept(callback) == [("step=6", 3.0)]
    assert (tmp_path / "c" / "best").resolve().name == "step=6"


def test_the_last_one_is_judged_by_steps_and_not_ranked_without_a_value_by_epochs(tmp_path: Path) -> None:
    by_steps = ModelCheckpoint(
        tmp_path / "s", "{step}", "val/score", save_top_k=2, save_last=True, every_n_train_steps=2
    )
    fit(by_steps, [5.0, 3.0], val_check_interval=4)
    assert kept(by_steps) == [("step=4", 5.0), ("step=8", 3.0)]
    by_epochs = ModelCheckpoint(tmp_path / "e", "{epoch}", "val/score", save_top_k=2, save_last=True)
    fit(by_epochs, [5.0, 3.0], max_epochs=3, check_val_every_n_epoch=2)
    assert kept(by_epochs) == [("epoch=1", 5.0)]
    assert (tmp_path / "e" / "last").resolve().name == "epoch=2"


def test_a_step_value_is_the_one_of_the_last_step_that_logged(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{step}", "step_value", save_top_k=-1, every_n_train_steps=4)
    fit(callback, [0.0], steps=11, log_every_n_steps=3)
    assert kept(callback) == [("step=4", 3.0), ("step=8", 6.0)]


def test_a_step_value_that_no_step_has_logged_yet_names_the_option(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", monitor="step_value", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match=r"'step_value' at step 2.*log_every_n_steps=50.*Set log_every_n_steps=2"):
        fit(callback, [0.0])


def test_by_the_clock_a_step_value_may_be_missing(tmp_path: Path) -> None:
    interval = timedelta(microseconds=1)
    callback = ModelCheckpoint(
        tmp_path / "c", "{step}-{step_value}", "step_value", save_top_k=-1, train_time_interval=interval
    )
    fit(callback, [0.0], log_every_n_steps=4)
    values = dict(kept(callback))
    assert math.isnan(values["step=2-step_value=nan"])
    assert values["step=6-step_value=4.0"] == 4.0


def test_an_epoch_value_is_awaited_inside_the_first_epoch(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{step}", "epoch_value", save_top_k=-1, every_n_train_steps=3)
    fit(callback, [], steps=4, max_epochs=2, limit_val_batches=0)
    (first, value), second = kept(callback)
    assert (first, math.isnan(value), second) == ("step=3", True, ("step=6", 1.0))


@pytest.mark.parametrize("after", [3, None])
def test_a_metric_that_was_never_logged_is_an_error_that_names_what_there_is(after: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", monitor="val/scroe", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match=r"monitors 'val/scroe', which was not logged: expected one of .*val/score"):
        fit(callback, [1.0, 1.0, 1.0], val_check_interval=after)


def test_a_filename_with_a_metric_that_was_never_logged_is_an_error(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{val/scroe}", every_n_train_steps=2)
    with pytest.raises(KeyError, match=r"filename has \{val/scroe\}, expected one of"):
        fit(callback, [1.0, 1.0, 1.0], val_check_interval=3)
    awaited = ModelCheckpoint(tmp_path / "d", "{step}-{val/score:.2f}", save_top_k=-1, every_n_train_steps=2)
    fit(awaited, [1.0, 2.0], val_check_interval=3)
    assert sorted(os.listdir(tmp_path / "d")) == [
        "step=2-val_score=nan", "step=4-val_score=1.00", "step=6-val_score=2.00", "step=8-val_score=2.00",
    ]  # fmt: skip


def test_early_stopping_counts_no_value_twice() -> None:
    callback = EarlyStopping("val/score", patience=2)
    trainer = fit(callback, [1.0, 1.0, 1.0, 1.0], steps=2, max_epochs=8, check_val_every_n_epoch=2)
    assert trainer.current_epoch == 6, "three validations, in epochs 1, 3 and 5"


def test_the_manifest_of_a_checkpoint_holds_what_it_was_judged_by(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "c", "{step}", "val/score", save_top_k=1, every_n_train_steps=4)
    fit(callback, [5.0, 7.0], val_check_interval=3)
    manifest = json.loads((Path(callback.best_model_path) / "manifest.json").read_text())
    assert (callback.best_model_score, manifest["metrics"]["val/score"], manifest["step"]) == (5.0, 5.0, 4)
