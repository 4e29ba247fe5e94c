"""Checkpoints that a thread writes while training goes on: what they hold, when they are told of, how they fail."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.strategies import DDPStrategy
from samestep.trainer import CheckpointError
from samestep.trainer.checkpoint import read_checkpoint, write
from samestep.trainer.checkpoint.snapshot import HostMemory, compact
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


def ones(samples: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


def trainer_with(*callbacks: Callback, **options: Any) -> Any:
    return quiet_trainer(**{"max_epochs": 1, "seed": 1, "enable_checkpointing": True, **options}, callbacks=callbacks)


class Held:
    """Lets the writer's thread stop before it writes its files, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        save = write.save_state

        def held(*arguments: Any) -> None:
            self.reached.set()
            assert self.go_on.wait(60)
            save(*arguments)

        monkeypatch.setattr(write, "save_state", held)


# --- what it holds ---------------------------------------------------------------------------


def states_of(folder: str, asynchronous: bool) -> list[dict[str, Any]]:
    keep = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, asynchronous=asynchronous)
    trainer = trainer_with(keep, precision=64)
    task = Regression()
    trainer.fit(task, loader(32, 4))
    found = [read_checkpoint(path) for path in keep.kept]
    assert all(torch.equal(found[-1].model[name], value) for name, value in task.state_dict().items())
    return [
        {
            **{name: tensor.tolist() for name, tensor in checkpoint.model.items()},
            "optimizers": str(checkpoint.training["optimizer_states"]),
            "progress": checkpoint.training["progress"],
            "step": checkpoint.manifest["step"],
        }
        for checkpoint in found
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_holds_the_state_of_its_step_whatever_is_trained_meanwhile(ranks: int, tmp_path: Path) -> None:
    background = run_ranks(states_of, ranks, str(tmp_path / "background"), True)
    foreground = run_ranks(states_of, ranks, str(tmp_path / "foreground"), False)
    assert len(background[0]) == 32 // 4 // ranks
    assert background == foreground


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    seen: list[tuple[str, bool]] = []

    class Watches(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            seen.append((keep.best_model_path, (tmp_path / "c" / "step-00000004").exists()))
            if trainer.global_step == 7:
                assert held.reached.wait(60)
                held.go_on.set()

    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=4)
    trainer_with(Watches(), keep).fit(ScalarWeight(), ones(7))
    assert seen == [("", False)] * 7
    assert keep.best_model_path == str(tmp_path / "c" / "step-00000004")
    assert read_checkpoint(keep.best_model_path).model["w"] == 1 - 4


# --- what is told ----------------------------------------------------------------------------


class Notes(Callback):
    """What each rank is told after each step, and whether it is true."""

    def __init__(self, keep: ModelCheckpoint) -> None:
        self.keep = keep
        self.told: list[tuple[int, str, str]] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.told.append((trainer.global_step, self.keep.best_model_path, self.keep.last_path))
        for path in self.told[-1][1:]:
            # The one before is removed as soon as the new one is complete, which is told at the next control word.
            assert not path or Path(path).is_dir() or list(Path(path).parent.glob("step-*"))


def told_on_ranks(folder: str) -> list[tuple[int, str, str]]:
    keep = ModelCheckpoint(folder, every_n_train_steps=3)
    notes = Notes(keep)
    trainer_with(notes, keep).fit(ScalarWeight(), ones(40))
    assert all(Path(path).is_dir() for path in keep.kept)
    return [*notes.told, (0, keep.best_model_path, ",".join(keep.kept))]


def test_all_ranks_are_told_at_the_same_step_and_only_what_is_on_the_disk(tmp_path: Path) -> None:
    first, second = run_ranks(told_on_ranks, 2, str(tmp_path / "c"))
    assert first == second
    assert {Path(path).name for _, path, _ in first[:-1]} - {""} <= {
        f"step-{step:08d}" for step in (3, 6, 9, 12, 15, 18)
    }
    assert Path(first[-1][1]).name == "step-00000020" or Path(first[-1][1]).name == "step-00000018"


def test_a_checkpoint_names_itself_and_what_it_replaces(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    trainer_with(keep).fit(ScalarWeight(), ones(3))
    state = read_checkpoint(keep.last_path).training["callbacks"][keep.state_key]
    names = {name: [Path(path).name for path in state[name]] for name in ("kept", "outlived")}
    # Killed between its commit and the removal of the one before, the next run would remove that.
    assert names == {"kept": ["step-00000003"], "outlived": ["step-00000002"]}
    assert state["last_path"] == keep.last_path
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000003"]


def test_a_checkpoint_of_the_users_own_is_there_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saves(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 2:
                timer = threading.Timer(0.3, held.go_on.set)
                timer.start()
                trainer.save_checkpoint(tmp_path / "mine")  # waits for the one that is being written
                timer.join()
                assert read_checkpoint(tmp_path / "mine").model["w"] == task.w
                assert [Path(path).name for path in keep.kept] == ["step-00000001"]

    held = Held(monkeypatch)
    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    trainer_with(keep, Saves()).fit(ScalarWeight(), ones(3))  # of the two, ModelCheckpoint comes last
    assert "a checkpoint waited 0." in capsys.readouterr().err


def test_without_collectives_for_the_thread_it_is_written_before_training_goes_on(tmp_path: Path) -> None:
    class Plain(DDPStrategy):
        def background_gather(self) -> None:  # pyright: ignore
            return None

    there: list[bool] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            there.append((tmp_path / "c" / f"step-{batch_idx:08d}").exists())

    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    trainer_with(keep, Looks(), strategy=Plain()).fit(ScalarWeight(), ones(3))
    assert there == [False, True, True]
    assert len(keep.kept) == 3


# --- failures --------------------------------------------------------------------------------


def fail_on_rank_1(folder: str, at: int, steps: int) -> None:
    save, failed_at = write.save_state, f".step-{at:08d}.partial"

    def full(state: Any, path: Path) -> None:
        if path.parent.name == failed_at and path.name == "rank-00001.pt":
            raise OSError(28, "No space left on device")
        save(state, path)

    write.save_state = full
    reached: list[int] = []

    class Counts(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            reached.append(trainer.global_step)

    keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    try:
        trainer_with(Counts(), keep).fit(ScalarWeight(), ones(2 * steps))
    except CheckpointError as error:
        raise RuntimeError(
            f"after step {reached[-1]}, kept {[Path(path).name for path in keep.kept]}: {error}"
        ) from None


@pytest.mark.parametrize(("at", "steps"), [(4, 200), (4, 5)])
def test_an_error_of_one_ranks_writer_is_raised_on_all_ranks_at_the_same_step(
    at: int, steps: int, tmp_path: Path
) -> None:
    first, second = errors_of_ranks(fail_on_rank_1, 2, str(tmp_path / "c"), at, steps)
    assert first == second
    assert "could not be written on rank 1: OSError: [Errno 28] No space left on device. Earlier" in first
    assert "kept ['step-00000002']" in first
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000002"]


def raise_while_writing(folder: str) -> None:
    class Raises(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and self.global_rank == 1:
                raise ValueError("broken batch")
            return super().training_step(batch, batch_idx)

    keep = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer_with(keep).fit(Raises(), ones(20))


def test_a_run_that_fails_finishes_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    errors = errors_of_ranks(raise_while_writing, 2, str(tmp_path / "c"))
    assert "broken batch" in errors[1]
    assert os.listdir(tmp_path / "c") == ["step-00000002"]
    assert read_checkpoint(tmp_path / "c" / "step-00000002").model["w"] == 1 - 2


def test_a_failed_run_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.trainer.checkpoint import background

    class Raises(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                assert held.reached.wait(60)
                raise ValueError("broken batch")
            return super().training_step(batch, batch_idx)

    held = Held(monkeypatch)
    monkeypatch.setattr(background, "_GRACE", 0.1)
    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1)
    with pytest.raises(ValueError, match="broken batch"):
        trainer_with(keep).fit(Raises(), ones(4))
    assert keep.last_path == ""
    held.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join(60)


# --- the snapshot ----------------------------------------------------------------------------


def a_state() -> dict[str, Any]:
    weight, large = torch.arange(6.0).reshape(2, 3), torch.arange(100.0)
    return {
        "tied": OrderedDict(a=weight, b=weight),
        "parameter": nn.Parameter(torch.ones(2)),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": large[10:20],
        "expanded": torch.ones(1).expand(3),
        "empty": torch.empty(0),
        "sparse": torch.eye(3).to_sparse(),
        "plain": [1, (2.5, "x"), None, {4, 5}],
        "count": Counter("aab"),
    }


def test_a_snapshot_keeps_what_was_there_and_uses_its_memory_again() -> None:
    memory, state, expected = HostMemory(), a_state(), a_state()
    expected["channels last"] = state["channels last"].clone()
    snapshot = memory.snapshot(state)
    for tensor in (*state["tied"].values(), state["channels last"], state["part"]):
        tensor.zero_()
    assert str(snapshot) == str(expected | {"parameter": torch.ones(2), "expanded": torch.ones(3)})
    assert snapshot["tied"]["a"] is snapshot["tied"]["b"]
    assert type(snapshot["tied"]) is OrderedDict
    assert snapshot["count"] == Counter("aab")
    assert snapshot["channels last"].stride() == state["channels last"].stride()
    assert snapshot["part"].untyped_storage().nbytes() == 40
    before = {name: snapshot[name].data_ptr() for name in ("part", "channels last")}
    again = memory.snapshot(a_state())
    assert {name: again[name].data_ptr() for name in before} == before
    assert again["part"][0] == 10


def test_what_is_saved_of_a_part_of_a_tensor_is_the_part() -> None:
    state = a_state()
    own = compact(state)
    assert own["part"].untyped_storage().nbytes() == 40
    assert own["tied"]["a"] is state["tied"]["a"]


@pytest.mark.gpu
def test_from_a_gpu_it_is_copied_to_pinned_memory_and_nothing_on_the_device() -> None:
    state = {"weight": torch.rand(1 << 20, device="cuda"), "more": [torch.rand(3, device="cuda")]}
    memory = HostMemory()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    snapshot = memory.snapshot(state)
    assert torch.cuda.max_memory_allocated() == before
    assert snapshot["weight"].is_pinned()
    assert torch.equal(snapshot["weight"], state["weight"].cpu())
    assert torch.equal(snapshot["more"][0], state["more"][0].cpu())
