"""Faults in a running program: all ranks end in bounded time, the first cause is told, nothing committed is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_ranks import end_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.callbacks.chaos import Chaos, Fault, damage, parse_faults
from samestep.strategies import DDPStrategy
from samestep.trainer import Trainer
from samestep.trainer.__main__ import main
from samestep.trainer.checkpoint import newest_intact
from tasks import Regression, ScalarWeight, loader, numbers, quiet_trainer
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset[Any]):
    """A dataset with an item that rank 1 can't read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 21:  # the 11th of rank 1
            raise ValueError("sample 21 is broken")
        return numbers(32)[index]


def build(folder: str, asynchronous: bool = False, **options: Any) -> Trainer:
    strategy = DDPStrategy(timeout=timedelta(seconds=4), startup_timeout=timedelta(seconds=8))
    # While training waits for it, the newest is that of the newest step.
    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, asynchronous=asynchronous)
    return quiet_trainer(**{
        "max_epochs": 2, "precision": 64, "seed": 1, "enable_checkpointing": True, "default_root_dir": folder,
        "strategy": strategy, "callbacks": [keep], "num_sanity_val_steps": 1, "val_check_interval": 3, **options,
    })  # fmt: skip


def train(folder: str, workers: int | None = None, asynchronous: bool = False) -> None:
    data = loader(32, 2) if workers is None else DataLoader(Broken(), 2, num_workers=workers)
    build(folder, asynchronous).fit(Regression(), data, loader(8, 2), ckpt_path="auto")


def leave_before_fit(folder: str) -> None:
    if os.environ["RANK"] == "1":
        sys.exit(0)
    train(folder)


def status(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "status.json").read_text())


CHAOS = "RuntimeError: chaos on rank 1"


@pytest.mark.parametrize(
    ("faults", "word", "reason", "place", "code", "saved"),
    [
        ("raise rank=1 step=5", "failed", CHAOS, "training, epoch 0, step 5", 1, 4),
        ("raise rank=1 phase=setup", "failed", CHAOS, "fit, epoch 0, step 0", 1, None),
        ("raise rank=1 phase=sanity", "failed", CHAOS, "sanity check, epoch 0, step 0", 1, None),
        ("raise rank=1 step=3 phase=validation", "failed", CHAOS, "validation, epoch 0, step 3", 1, 2),
        ("raise rank=1 step=4 phase=saving", "failed", CHAOS, "training, epoch 0, step 4", 1, 2),
        ("quit rank=1 step=5 code=0", "failed", "the program called sys.exit(0)", "training, epoch 0, step 5", 0, 4),
        ("oom rank=1 step=5", "oom", "can't allocate memory", "training, epoch 0, step 5", 1, 4),
        ("kill rank=1 step=5", "failed", "no word from rank 1: killed, ended by os._exit, or stuck", "", -9, 4),
        ("exit rank=1 step=5 code=0", "failed", "no word from rank 1", "", 0, 4),
        ("raise rank=1 phase=end", "failed", CHAOS, "training, epoch 2, step 16", 1, 16),
        ("kill rank=1 phase=end", "failed", "no word from rank 1", "", -9, 16),
        ("stall rank=1 step=5 seconds=15", "hung", "no word from rank 1", "", 1, 4),
    ],
)
def test_a_fault_on_one_rank_ends_all_and_its_peer_says_what_it_was(
    faults: str, word: str, reason: str, place: str, code: int, saved: int | None, tmp_path: Path
) -> None:
    first, second = end_ranks(train, 2, "run", faults=faults)
    assert (first.exit_code, second.exit_code) == (1, code), first.told + second.told
    told = status("run")
    assert (told["status"], told["rank"], told["place"]) == (word, 1, place)
    assert reason in told["reason"]
    where = f" in {place}" if place else ""
    assert f"PeerError: rank 1 ended the run{where}: " in first.told
    assert reason in first.told.splitlines()[-1]
    if code == 1 and word != "hung":
        assert reason in second.told
        assert "Error" in second.told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_intact([Path("run/checkpoints")])
    assert (None if found is None else found.name) == (saved and f"step-{saved:08d}")  # what was saved before is whole


@pytest.mark.parametrize(
    ("workers", "reason"),
    [(0, "ValueError: sample 21 is broken"), (1, "ValueError: sample 21 is broken (in a worker of a DataLoader)")],
)
def test_a_sample_that_one_rank_can_not_read_ends_all(workers: int, reason: str, tmp_path: Path) -> None:
    first, second = end_ranks(train, 2, "run", workers)
    assert (first.exit_code, second.exit_code) == (1, 1), first.told + second.told
    assert (status("run")["rank"], status("run")["reason"]) == (1, reason)
    assert f"rank 1 ended the run in training, epoch 0, step 5: {reason}" in first.told


def test_a_rank_that_leaves_before_fit_is_named_and_not_waited_for(tmp_path: Path) -> None:
    first, second = end_ranks(leave_before_fit, 2, "run")
    assert (first.exit_code, second.exit_code) == (1, 0), first.told + second.told
    assert "rank 1 has ended its program and never came here, where the other ranks wait for it" in first.told


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class FailsOnRank(Regression):
    """Fails on one rank, in `prepare_data`, or in a step with an exception that has no text."""

    def prepare_data(self) -> None:
        if self.global_rank == self.failing == 0:
            raise ValueError("the download failed")

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == self.failing:
            raise UnreadableError
        return super().training_step(batch, batch_idx)


def fail_on(folder: str, rank: int) -> None:
    build(folder).fit(FailsOnRank(rank), loader(32, 2))


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(0, "ValueError: the download failed"), (1, "UnreadableError: (its __str__ raised RuntimeError)")],
)
def test_the_rank_that_failed_is_named_by_all_whatever_it_raised(rank: int, reason: str, tmp_path: Path) -> None:
    ranks = end_ranks(fail_on, 2, "run", rank)
    assert [ended.exit_code for ended in ranks] == [1, 1]
    assert (status("run")["rank"], status("run")["reason"]) == (rank, reason)
    last = ranks[1 - rank].told.splitlines()[-1]
    assert f"PeerError: rank {rank} ended the run in " in last
    assert reason in last


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_all_ranks_with_the_reason_and_leaves_what_was_saved(
    asynchronous: bool, tmp_path: Path
) -> None:
    for ended in end_ranks(train, 2, "run", None, asynchronous, faults="full-disk rank=1 step=6"):
        assert ended.exit_code == 1
        assert "step-00000006 could not be written on rank 1: OSError: [Errno 28]" in ended.told
        assert "Earlier checkpoints are intact" in ended.told
    assert (status("run")["status"], status("run")["rank"]) == ("failed", 1)
    assert "could not be written on rank 1" in status("run")["reason"]
    assert sorted(os.listdir("run/checkpoints")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_damaged_checkpoint_is_passed_over_by_the_run_that_goes_on(how: str, tmp_path: Path) -> None:
    first, second = end_ranks(train, 2, "run", faults=f"damage rank=0 step=4 how={how}; kill rank=1 step=5")
    assert (first.exit_code, second.exit_code) == (1, -9), first.told
    first, second = end_ranks(train, 2, "run")
    assert (first.exit_code, second.exit_code) == (0, 0), first.told
    assert "step-00000004/model.safetensors is damaged" in first.told
    assert status("run")["status"] == "completed"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(asynchronous: bool, tmp_path: Path) -> None:
    first, second = end_ranks(train, 2, "run", None, asynchronous, faults="kill rank=0 step=6 phase=writing")
    assert (first.exit_code, second.exit_code) == (-9, 1), second.told
    assert str(newest_intact([Path("run/checkpoints")])) == "run/checkpoints/step-00000004"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_while_a_thread_writes_leaves_whole_checkpoints_from_which_the_run_goes_on(
    rank: int, tmp_path: Path
) -> None:
    ranks = end_ranks(train, 2, "run", None, True, faults=f"slow-disk rank=0 seconds=0.2; kill rank={rank} step=5")
    assert (ranks[rank].exit_code, ranks[1 - rank].exit_code) == (-9, 1), ranks[1 - rank].told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = newest_intact([Path("run/checkpoints")])
    assert newest is not None
    assert newest.name == "step-00000002"  # the next one waited for it, and was not through when the kill came
    ranks = end_ranks(train, 2, "run", None, True)
    assert [ended.exit_code for ended in ranks] == [0, 0], ranks[0].told
    assert sorted(os.listdir("run/checkpoints")) == [f"step-{step:08d}" for step in range(2, 17, 2)]


def test_a_rank_that_stands_still_is_named_and_does_not_hold_the_others(tmp_path: Path) -> None:
    first, second = end_ranks(train, 2, "run", faults="stop rank=1 step=5", timeout=20)
    assert first.exit_code == 1
    assert second.exit_code is None  # the launcher has to end it, as torch's agent does
    assert (status("run")["status"], status("run")["rank"]) == ("hung", 1)


# --- one process -----------------------------------------------------------------------------


def fit(faults: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ScalarWeight:
    monkeypatch.setenv("SAMESTEP_CHAOS", faults)
    task = ScalarWeight()
    quiet_trainer(max_epochs=1, **options).fit(task, DataLoader(torch.ones(4), 1))
    return task


def test_gradients_become_nan_in_the_step_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Watches(ScalarWeight):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.w.grad is not None
            seen.append(self.w.grad.item())

    monkeypatch.setenv("SAMESTEP_CHAOS", "nan step=2")
    quiet_trainer(max_epochs=1).fit(Watches(), DataLoader(torch.ones(4), 1))
    assert str(seen) == "[1.0, 1.0, nan, 1.0]"


def test_a_slow_disk_delays_the_files_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    fsync = os.fsync
    fit("slow-disk seconds=0.25 step=4", monkeypatch, enable_checkpointing=True)
    assert waited.count(0.25) >= 4  # model, training state, the rank's, the manifest
    assert os.fsync is fsync


def test_a_fault_waits_for_its_rank_and_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit("raise rank=1; raise restart=2; raise step=4", monkeypatch).w == -3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="chaos on rank 0"):
        fit("raise restart=2", monkeypatch)
    with pytest.raises(RuntimeError, match="chaos on rank 0"):
        fit("raise restart=any", monkeypatch)


def test_without_the_variable_there_is_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMESTEP_CHAOS", raising=False)
    assert not any(isinstance(callback, Chaos) for callback in quiet_trainer().callbacks)


def test_faults_are_read() -> None:
    assert parse_faults("kill rank=1 step=7; nan step=9 restart=any") == [
        Fault("kill", 1, 7, "training", 0, {}), Fault("nan", None, 9, "backward", None, {})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no fault"),
        ("kil rank=1", "no fault 'kil': expected one of kill, term"),
        (
            "kill ranks=1",
            "'ranks=1' in the fault 'kill ranks=1': expected name=value with rank, step, phase, restart, to",
        ),
        ("kill rank=one", "rank=one: expected a whole number"),
        ("kill phase=train", "phase=train in the fault 'kill phase=train': expected setup, loading"),
        ("nan phase=training", "expected backward"),
        ("kill to=agent", "to=agent in the fault 'kill to=agent': expected rank or launcher"),
        ("stall seconds=long", "seconds=long"),
        ("damage how=burn", "expected flip or truncate"),
        ("kill code=1", "'code=1' in the fault"),
    ],
)
def test_faults_that_can_not_be_read_are_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_faults(text)
    assert main(["chaos", text, "--", "true"]) == 2
    assert "samestep chaos: " in capsys.readouterr().err


def test_a_file_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"aaaa")
    damage(file, "flip")
    assert file.read_bytes() == b"aa`a"
    damage(file, "truncate")
    assert file.read_bytes() == b"aa"


PROGRAM = """
from tasks import *
quiet_trainer(max_epochs=2, precision=64, default_root_dir="run", logger=True).fit(Regression(), loader(32, 4))
"""


@pytest.mark.slow
def test_the_command_makes_faults_in_a_program_that_knows_nothing_of_them(tmp_path: Path) -> None:
    Path("program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "samestep.trainer", "chaos", "quit rank=1 step=5 code=0", "--",
         sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"],
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "samestep chaos: quit on rank 1, training, step 5" in done.stderr
    root = done.stderr.partition("Root Cause")[2]
    assert "rank 1 ended the run in training, epoch 1, step 5: the program called sys.exit(0)" in root
    assert status("run")["reason"] == "the program called sys.exit(0)"
