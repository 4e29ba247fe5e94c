"""Ways in which ranks could silently part, or work be lost: each is an error that says so, or right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import RankError, errors_of_ranks, run_ranks
from samestep.callbacks import EarlyStopping, ModelCheckpoint
from samestep.strategies import DDPStrategy, Strategy
from samestep.trainer import CheckpointError, Task
from samestep.trainer.checkpoint import newest_intact
from samestep.trainer.checkpoint.folder import verify
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


def ones(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


# --- ranks that part -------------------------------------------------------------------------


class Unused(ScalarWeight):
    """A second parameter that some steps don't use."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.ones(()))
        self.when = when

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        used = {"never": False, "last": batch_idx < 3, "one rank": self.global_rank == 0 or batch_idx < 3}[self.when]
        return super().training_step(batch, batch_idx) + (self.u if used else 0.0)


def train_unused(when: str, find: bool) -> float:
    task = Unused(when)
    strategy = DDPStrategy(find_unused_parameters=find)
    quiet_trainer(max_epochs=1, strategy=strategy).fit(task, ones())
    return task.w.item() + task.u.item()


@pytest.mark.parametrize("when", ["never", "last"])
def test_an_unused_parameter_is_named_before_the_step_that_would_part_the_ranks(when: str) -> None:
    for error in errors_of_ranks(train_unused, 2, when, False):
        assert "the loss did not depend on these parameters in this step: u." in error
        assert "find_unused_parameters=True" in error


def test_a_parameter_unused_on_one_rank_in_the_last_step_ends_all_ranks() -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 1: the loss did not depend on these parameters in this step: u"):
        run_ranks(train_unused, 2, "one rank", False, timeout=50)
    assert time.monotonic() - begun < 45


@pytest.mark.parametrize("when", ["never", "last", "one rank"])
def test_unused_parameters_may_be_found(when: str) -> None:
    first, second = run_ranks(train_unused, 2, when, True)
    assert first == second


def train_with_random_hook(hook: str) -> None:
    def disturb(self: Any) -> None:
        with torch.no_grad():
            self.net[2].bias += torch.randn(1)

    kind = type("Disturbed", (Regression,), {hook: disturb})
    quiet_trainer(max_epochs=2, seed=1).fit(kind().double(), loader(16, 4))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_weights_that_a_hook_changed_differently_are_an_error(hook: str) -> None:
    for error in errors_of_ranks(train_with_random_hook, 2, hook):
        assert "the ranks hold different weights: net.2.bias on rank 1" in error


def prepare_slowly() -> bool:
    class Slow(ScalarWeight):
        def prepare_data(self) -> None:
            time.sleep(4)

    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    quiet_trainer(max_epochs=1, strategy=strategy).fit(Slow(), ones())
    return True


def test_preparing_data_may_take_longer_than_a_collective() -> None:
    assert run_ranks(prepare_slowly, 2) == [True, True]


# --- runs inside runs ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("same", [True, False])
def test_a_run_inside_a_run_is_refused(stage: str, same: bool) -> None:
    class Nested(Regression):
        def on_train_epoch_end(self) -> None:
            trainer = self.trainer if same else quiet_trainer(max_epochs=1)
            getattr(trainer, stage)(self, loader(8, 4))

    with pytest.raises(RuntimeError, match=f"{stage} inside a running fit"):
        quiet_trainer(max_epochs=1, precision=64).fit(Nested(), loader(8, 4))


def test_another_trainer_may_train_another_task_inside_a_run() -> None:
    class Outer(ScalarWeight):
        def on_train_epoch_end(self) -> None:
            quiet_trainer(max_epochs=1).fit(ScalarWeight(), ones(2))

    task = Outer()
    quiet_trainer(max_epochs=2).fit(task, ones(2))
    assert task.w == -3


# --- resuming --------------------------------------------------------------------------------


class ByValidation(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "validation"}}


@pytest.mark.parametrize("across", [False, True])
def test_a_checkpoint_of_a_validation_inside_an_epoch_holds_what_the_validation_changed(
    across: bool, tmp_path: Path
) -> None:
    def run(folder: str, ckpt_path: str | None = None) -> tuple[Any, ModelCheckpoint]:
        keep = ModelCheckpoint(tmp_path / folder, "{step}", monitor="val/loss", save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=2, precision=64, seed=1, val_check_interval=3, enable_checkpointing=True, callbacks=[keep],
            check_val_every_n_epoch=None if across else 1,
        )  # fmt: skip
        task = ByValidation()
        trainer.fit(task, loader(32, 4, shuffle=True), loader(8, 4), ckpt_path=ckpt_path)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return (parameters_of(task).tolist(), rate, trainer.progress.state_dict()), keep

    whole, keep = run("whole")
    for path in keep.kept:
        assert run(f"resumed-{Path(path).name}", path)[0] == whole


def test_another_batch_size_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 1, "precision": 64, "seed": 1, "enable_checkpointing": True}
    quiet_trainer(callbacks=[keep], **options).fit(Regression(), loader(32, 4))
    with pytest.raises(
        CheckpointError,
        match="with batches of 4 samples; 1 rank with batches of 8 samples would take 8 where it took 4",
    ):
        quiet_trainer(**options, default_root_dir=tmp_path / "other").fit(
            Regression(), loader(32, 8), ckpt_path=next(iter(keep.kept))
        )


def test_the_checkpoints_of_the_run_before_stay_where_they_are(tmp_path: Path) -> None:
    def run(folder: str, epochs: int, ckpt_path: str | None = None) -> ModelCheckpoint:
        keep = ModelCheckpoint(tmp_path / folder, "{epoch}", monitor="val/loss", save_top_k=2)
        trainer = quiet_trainer(max_epochs=epochs, precision=64, seed=1, enable_checkpointing=True, callbacks=[keep])
        trainer.fit(Regression(), loader(32, 4), loader(8, 4), ckpt_path=ckpt_path)
        return keep

    first = run("first", 3)
    before = sorted(os.listdir(tmp_path / "first"))
    run("second", 6, first.last_path)
    assert sorted(os.listdir(tmp_path / "first")) == before


# --- saving ----------------------------------------------------------------------------------


class WithExtra(ScalarWeight):
    def get_extra_state(self) -> Any:
        return np.zeros(3)

    def set_extra_state(self, state: Any) -> None: ...


def test_an_extra_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path / "c")])
    with pytest.raises(TypeError, match=r"the extra state of the model.*numpy\.ndarray"):
        trainer.fit(WithExtra(), ones())


def test_a_checkpoint_that_failed_is_not_called_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("No space left on device")

    keep = ModelCheckpoint(tmp_path / "c", save_top_k=-1)
    trainer = quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[keep])

    class FillsUp(ScalarWeight):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.wait_for_checkpoint()
                monkeypatch.setattr(safetensors.torch, "save_file", full)

    with pytest.raises(CheckpointError, match=r"No space left on device\. Earlier checkpoints are intact"):
        trainer.fit(FillsUp(), ones())
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000008"]
    assert Path(keep.last_path).is_dir()
    assert list(keep.kept) == [keep.last_path]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"step": null}', "{", '{"format": 1}', '{"format": 7}'])
def test_a_manifest_of_nonsense_is_passed_over(content: str, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "c", save_top_k=-1)
    quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[keep]).fit(ScalarWeight(), ones())
    first, last = keep.kept
    (Path(last) / "manifest.json").write_text(content)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="samestep: passed over")
        assert str(newest_intact([tmp_path / "c"])) == first
    with pytest.raises(CheckpointError):
        verify(Path(last))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_saving_replaces_nothing_but_checkpoints(kind: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(ScalarWeight(), ones())
    target = tmp_path / "mine"
    notes = target / "notes.txt" if kind == "folder" else target
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    with pytest.raises(CheckpointError, match="there is something else of that name, which is not replaced"):
        trainer.save_checkpoint(target)
    assert notes.read_text() == "mine"
    assert os.listdir(tmp_path) == ["mine"]
    for _ in range(2):  # a checkpoint is replaced
        trainer.save_checkpoint(tmp_path / "checkpoint")
    assert ScalarWeight.load_from_checkpoint(tmp_path / "checkpoint").w == trainer.task.w


# --- before anything starts ------------------------------------------------------------------


class NoCollectives(Strategy):
    """As a user may write one, with one process in mind."""


def build_without_collectives() -> None:
    quiet_trainer(strategy=NoCollectives())


def test_a_strategy_without_collectives_is_refused_on_several_ranks() -> None:
    build_without_collectives()
    for error in errors_of_ranks(build_without_collectives, 2):
        assert "(NoCollectives) on 2 processes: it has no collectives" in error


def test_nothing_to_train_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(ScalarWeight(), ones())
    trainer.fit(ScalarWeight(), ones())
    assert capsys.readouterr().out == "nothing to train: 1 epoch and 8 steps are done already\n"


class Foreign(ScalarWeight):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


class Uninitialized(Task):
    def __init__(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def configure_optimizers(self) -> Any: ...


def test_more_that_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no parameter of Foreign"):
        quiet_trainer().fit(Foreign(), ones())
    with pytest.raises(TypeError, match=r"has not called super\(\).__init__\(\)"):
        quiet_trainer().fit(Uninitialized(), ones())
    with pytest.raises(TypeError, match="expected a Callback object, or a list"):
        quiet_trainer(callbacks=EarlyStopping)


@pytest.mark.parametrize("flags", [["-"], ["-u", "-"], ["-W", "ignore"]])
def test_a_program_from_standard_input_can_not_be_started_again(flags: list[str]) -> None:
    program = "from tasks import *\nquiet_trainer(max_epochs=1, devices=2).fit(ScalarWeight(), DataLoader(torch.ones(4), 1))\n"
    done = subprocess.run(
        [sys.executable, *flags], input=program, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "this process has no program" in done.stderr


def test_runs_that_begin_together_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = run_ranks(alone_in, 3, str(tmp_path), join_group=False)
    assert len(set(folders)) == 3
    for folder in folders:
        assert (tmp_path / folder / "checkpoints").is_dir()


def alone_in(folder: str) -> str:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.chdir(folder)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True)
    trainer.fit(ScalarWeight(), ones())
    return str(trainer.run_folder)
