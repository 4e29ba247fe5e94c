"""Names and folders of checkpoints: links, runs side by side, what dead runs leave, which one is the newest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import CheckpointError
from samestep.trainer.checkpoint import folder, newest_intact, read_checkpoint, staging
from samestep.trainer.checkpoint.staging import claim, claim_new, release, sweep
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch.utils.data import DataLoader


def ones(samples: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


def fit(folder: Path | None, epochs: int, ckpt_path: Any = None, **options: Any) -> ModelCheckpoint:
    keep = ModelCheckpoint(**options)
    trainer = quiet_trainer(
        max_epochs=epochs, default_root_dir=folder, enable_checkpointing=True, callbacks=[keep], seed=1
    )
    trainer.fit(ScalarWeight(), ones(), ckpt_path=ckpt_path)
    return keep


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.is_symlink())


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["best", "last", "", ".", "..", ".hidden", "a/b", "a/{step}"])
def test_names_of_the_links_and_hidden_or_nested_ones_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(filename=.*expected the name of a folder"):
        ModelCheckpoint(filename=name)
    ModelCheckpoint(filename="{val/acc:.2f}-best")


@pytest.mark.parametrize("link", ["best", "last"])
def test_a_folder_in_the_place_of_a_link_is_named_before_the_first_step(link: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / link).mkdir(parents=True)
    needs: dict[str, Any] = {"best": {"monitor": "x"}, "last": {"save_last": True}}[link]
    with pytest.raises(FileExistsError, match=f"{link} is there and no link"):
        fit(tmp_path, 1, **needs)
    fit(tmp_path, 1)  # which makes no links


def test_there_is_nothing_to_save_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing to save in .*x yet"):
        quiet_trainer().save_checkpoint(tmp_path / "x")
    with pytest.raises(RuntimeError, match="inside fit only"):
        quiet_trainer().learning_rates()
    assert os.listdir(tmp_path) == []


# --- runs side by side -----------------------------------------------------------------------


def run_alone(folder: str) -> list[str]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return list(fit(Path(folder), 4, save_top_k=-1, save_last=True, every_n_train_steps=1).kept)


def test_two_runs_in_one_folder_write_their_own_checkpoints(tmp_path: Path) -> None:
    first, second = run_ranks(run_alone, 2, str(tmp_path), join_group=False)
    assert len(first) == len(second) == 16
    assert not set(first) & set(second)
    assert names(tmp_path / "checkpoints") == sorted(Path(path).name for path in (*first, *second))
    for path in (*first, *second):
        read_checkpoint(path)


HOLDER = """
import sys
from pathlib import Path
from samestep.trainer.checkpoint.staging import claim, staging_of
path = Path(sys.argv[1])
print(claim(path), flush=True)
staging_of(path).mkdir()
(staging_of(path) / "training.pt").write_text("half")
input()
"""


def test_what_a_dead_run_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        foreign = tmp_path / ".mine.partial"
        foreign.mkdir()
        (foreign / "notes.txt").write_text("mine")
        (tmp_path / ".mine.lock").touch()
        (tmp_path / ".yours.partial.lock").write_text("yours")
        (tmp_path / ".c.partial.lock").touch()  # killed before it made the folder
        while not (tmp_path / ".a.partial" / "training.pt").exists():
            pass
        assert not claim(tmp_path / "a")
        sweep(tmp_path)
        assert not (tmp_path / ".c.partial.lock").exists()
        assert (tmp_path / ".a.partial" / "training.pt").exists()
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(ScalarWeight(), ones())
        with pytest.raises(CheckpointError, match="another run is writing a checkpoint of that name"):
            trainer.save_checkpoint(tmp_path / "a")
        assert (tmp_path / ".a.partial" / "training.pt").exists()
    finally:
        holder.kill()
        holder.communicate()
    sweep(tmp_path)
    foreign = [".mine.lock", ".mine.partial", ".yours.partial.lock"]
    assert sorted(os.listdir(tmp_path)) == foreign
    trainer.save_checkpoint(tmp_path / "a")
    assert not claim_new(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == [*foreign, "a"]


def test_a_process_that_only_looks_at_a_lock_does_not_take_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = staging._lock(tmp_path / "a")
    monkeypatch.setattr(time, "sleep", lambda seconds: staging._unlock(tmp_path / "a", looking))
    assert claim(tmp_path / "a")
    release(tmp_path / "a")
    assert os.listdir(tmp_path) == []


# --- the newest ------------------------------------------------------------------------------


def test_auto_takes_the_one_made_last_and_not_the_highest_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 3)
    anew = fit(tmp_path, 1)
    capsys.readouterr()
    fit(tmp_path, 2, "auto")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"resuming from {anew.last_path} (epoch 0, step 4)"


def test_checkpoints_are_in_the_order_in_which_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(datetime):
        """A clock that goes to 2000 and stays there."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2000, 1, 1, tzinfo=tz)

    begun = fit(tmp_path, 1).last_path
    monkeypatch.setattr(folder, "datetime", Backwards)
    monkeypatch.setattr(folder, "_created", datetime.min.replace(tzinfo=timezone.utc))
    keep = fit(tmp_path, 3, begun, save_top_k=-1)
    made = [json.loads((Path(path) / "manifest.json").read_text())["created"] for path in keep.kept]
    assert made == sorted(set(made))


def test_weights_only_can_not_be_the_newest(tmp_path: Path) -> None:
    whole = fit(tmp_path, 1)
    fit(tmp_path, 3, save_weights_only=True)
    assert str(newest_intact([tmp_path / "checkpoints"])) == whole.last_path


def test_auto_says_why_it_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, 1, "auto")
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        f"ckpt_path='auto': there is no intact checkpoint in {tmp_path / 'checkpoints'}, so this run starts anew"
    )
    fit(None, 1, "auto")
    line = capsys.readouterr().out.splitlines()[0]
    assert "checkpoints is this run's own new folder (set default_root_dir to find earlier runs)" in line
    quiet_trainer(max_epochs=1).fit(ScalarWeight(), ones(), ckpt_path="auto")
    assert "there is no ModelCheckpoint" in capsys.readouterr().out


# --- what a resumed run leaves ---------------------------------------------------------------


def test_resuming_again_and_again_leaves_no_checkpoint_over(tmp_path: Path) -> None:
    for epochs in (1, 2, 3, 4):
        fit(tmp_path, epochs, "auto")
        left = [f"step-{4 * epoch:08d}" for epoch in (epochs - 1, epochs) if epoch]
        assert names(tmp_path / "checkpoints") == left, "the newest, and the one that this run was resumed from"


def test_the_one_resumed_from_is_there_while_its_run_lasts(tmp_path: Path) -> None:
    first = fit(tmp_path, 1)
    fit(tmp_path, 5, "auto")
    assert names(tmp_path / "checkpoints") == ["step-00000004", "step-00000020"]
    assert Path(first.last_path).is_dir()
    other = tmp_path / "other"
    fit(other, 6, tmp_path / "checkpoints" / "step-00000020")
    assert names(tmp_path / "checkpoints") == ["step-00000004", "step-00000020"], "another folder is left alone"


# --- resuming inside an epoch ----------------------------------------------------------------


def resume_with(folder: str, samples: int, accumulate: int, ckpt_path: str | None) -> list[str]:
    keep = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=1, precision=64, seed=1, enable_checkpointing=True, callbacks=[keep],
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(Regression(), loader(samples, 2), ckpt_path=ckpt_path)
    return list(keep.kept)


@pytest.mark.parametrize(
    ("samples", "accumulate", "message"),
    [
        (34, 1, "with a training set of 32 samples; here it would go on with a training set of 34 samples"),
        (32, 2, "with windows of 1 micro-batch; here it would go on with windows of 2 micro-batches"),
    ],
)
def test_other_data_and_other_windows_are_refused_inside_an_epoch(
    samples: int, accumulate: int, message: str, tmp_path: Path
) -> None:
    paths = resume_with(str(tmp_path / "a"), 32, 1, None)
    with pytest.raises(CheckpointError, match=message):
        resume_with(str(tmp_path / "b"), samples, accumulate, paths[0])
    assert resume_with(str(tmp_path / "c"), 32, 1, paths[0])


def resume_on_two(folder: str, path: str) -> None:
    resume_with(folder, 34, 1, path)


def test_the_refusal_is_the_same_on_every_rank(tmp_path: Path) -> None:
    paths = run_ranks(resume_with, 2, str(tmp_path / "a"), 32, 1, None)[0]
    for error in errors_of_ranks(resume_on_two, 2, str(tmp_path / "b"), paths[0]):
        assert "Use the same data, or resume from a checkpoint of an epoch's end" in error


# --- buffers ---------------------------------------------------------------------------------


class Expanded(ScalarWeight):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(3.0).unsqueeze(1).expand(3, 4))
        self.register_buffer("same", self.scale)


def load_expanded(folder: str) -> bool:
    keep = ModelCheckpoint(folder)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[keep])
    task = Expanded()
    trainer.fit(task, ones())
    again = Expanded.load_from_checkpoint(keep.best_model_path)
    quiet_trainer(max_epochs=2).fit(Expanded(), ones(), ckpt_path=keep.best_model_path)
    return torch.equal(again.scale, Expanded().scale) and again.scale is again.same and task.scale is task.same


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_buffer_made_by_expand_is_loaded_again(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(load_expanded, ranks, str(tmp_path / "c")) == [True] * ranks
