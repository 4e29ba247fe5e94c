"""How a run ends: the first failure is the one that is raised and recorded, and nothing is left in flight."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback
from samestep.strategies import error_file, first_cause
from samestep.trainer import DataModule
from samestep.trainer.signals import SignalHandlers
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset


def ones(samples: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


# --- the first failure -----------------------------------------------------------------------


class Fails(ScalarWeight):
    """Raises wherever it is told to."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def teardown(self, stage: str) -> None:
        self.fail("teardown")

    def fail(self, place: str) -> None:
        if place in self.places:
            raise ValueError(f"{place} of the task")


class FailsToo(Callback):
    def __init__(self, *places: str) -> None:
        self.places = places
        self.seen: list[str] = []

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self.seen.append(str(exception))
        if "on_exception" in self.places:
            raise RuntimeError("on_exception of the callback")

    def teardown(self, trainer: Any, task: Any, stage: str) -> None:
        self.seen.append("teardown")
        if "teardown" in self.places:
            raise RuntimeError("teardown of the callback")


class Data(DataModule):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def train_dataloader(self) -> Any:
        return ones()

    def on_exception(self, exception: BaseException) -> None:
        self.seen.append(str(exception))

    def teardown(self, stage: str) -> None:
        self.seen.append("teardown")


@pytest.mark.parametrize(
    ("places", "callback", "first", "beside"),
    [
        (["training_step"], [], "training_step of the task", []),
        (["training_step", "teardown"], [], "training_step of the task", ["teardown of the task"]),
        (
            ["training_step", "teardown"],
            ["on_exception", "teardown"],
            "training_step of the task",
            ["on_exception of the callback", "teardown of the callback", "teardown of the task"],
        ),
        (["teardown"], [], "teardown of the task", []),
        (["teardown"], ["teardown"], "teardown of the callback", ["teardown of the task"]),
    ],
)
def test_the_first_failure_is_raised_and_recorded_and_later_ones_are_shown(
    places: list[str], callback: list[str], first: str, beside: list[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    watcher, data = FailsToo(*callback), Data()
    trainer = quiet_trainer(max_epochs=1, callbacks=[watcher])
    with pytest.raises((ValueError, RuntimeError), match=first):
        trainer.fit(Fails(*places), datamodule=data)
    recorded = json.loads((tmp_path / "error.json").read_text())["message"]
    assert recorded["message"].endswith(first)
    assert first in recorded["extraInfo"]["py_callstack"]
    shown = capsys.readouterr().err
    assert [line.partition(": ")[2] for line in shown.splitlines() if line[:5] in ("Value", "Runti")] == beside
    assert data.seen.count("teardown") == watcher.seen.count("teardown") == 1
    assert data.seen.count(first) == watcher.seen.count(first) == 1
    assert not trainer.running
    watcher.places = ()
    trainer.fit(ScalarWeight(), datamodule=data)  # nothing is left that would disturb another run


def test_an_error_that_a_peer_has_ended_is_dated_behind_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 100.5)
    dates: list[str] = []
    for number, error in enumerate([
        ValueError("cause"), RuntimeError("Connection closed by peer [::1]"),
        RuntimeError("rank 0 could not finish the collective 'x'"),
    ]):  # fmt: skip
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"error-{number}.json"))
        error_file.record_error(error)
        dates.append(json.loads((tmp_path / f"error-{number}.json").read_text())["message"]["extraInfo"]["timestamp"])
    assert dates == ["100", "160", "160"]


def test_a_rank_that_its_launcher_ends_waits_for_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher has seen another rank end: what that had to tell is told, and nobody needs a head start any more."""
    monkeypatch.setattr(first_cause, "_PATIENCE", 1e6)
    monkeypatch.setattr(error_file, "_HEAD_START", 1e6)
    store = torch.distributed.HashStore()
    cause = first_cause.FirstCause(store, store, rank=0, world_size=2)
    control: Any = SimpleNamespace(raise_signal=lambda number: None)

    def ended(handlers: SignalHandlers) -> None:
        handlers.control = control
        os.kill(os.getpid(), signal.SIGTERM)
        end = cause.of_peers(timed_out=False, in_haste=lambda: handlers.is_being_ended)
        assert end is not None
        assert end.rank == 1
        raise first_cause.PeerError(end.reason)

    with pytest.raises(first_cause.PeerError) as caught, SignalHandlers(enabled=True, rank=0) as handlers:
        ended(handlers)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    error_file.record_uncaught_errors()
    sys.excepthook(type(caught.value), caught.value, None)
    assert "no word from rank 1" in (tmp_path / "error.json").read_text()


def test_an_error_that_a_worker_has_ended_does_not_replace_what_the_worker_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    path.write_text("of the worker")
    error_file.record_error(RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly"))
    assert path.read_text() == "of the worker"
    error_file.record_error(ValueError("of the rank itself"))
    assert "of the rank itself" in path.read_text()


# --- workers of loaders ----------------------------------------------------------------------


class KillsWorker(ScalarWeight):
    """Kills a worker of the loader in a step, where torch does not notice, and fails because of another rank, it seems."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_workers()
        signal.signal(signal.SIGCHLD, before)
        raise RuntimeError("Connection closed by peer")


class KillsWorkerLater(Callback):
    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        kill_workers()

    def teardown(self, trainer: Any, task: Any, stage: str) -> None:
        time.sleep(0.01)


def kill_workers() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)  # dead, and torch can still ask how it ended


def with_worker() -> DataLoader[Any]:
    return DataLoader(torch.ones(8), 1, num_workers=1)


def test_a_worker_that_has_died_is_the_cause_of_a_lost_connection(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        quiet_trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True).fit(
            KillsWorker(), with_worker()
        )
    assert "DataLoader worker" in json.loads((tmp_path / "status.json").read_text())["reason"]


def test_a_worker_that_dies_while_an_error_is_handled_disturbs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(ValueError, match="training_step of the task"):
        quiet_trainer(max_epochs=1, callbacks=[KillsWorkerLater()]).fit(Fails("training_step"), with_worker())
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGCHLD) is before or callable(signal.getsignal(signal.SIGCHLD))


class Stops(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise StopIteration
        return torch.ones(())


def test_a_dataset_that_raises_stop_iteration_is_told_from_a_wrong_length() -> None:
    with pytest.raises(
        RuntimeError, match=r"gave 3 batches, but its length is 8\. Correct the dataset \(an item that raises Stop"
    ):
        quiet_trainer(max_epochs=1).fit(ScalarWeight(), DataLoader(Stops(), 1))


# --- parameters without a shape --------------------------------------------------------------


class Lazy(Regression):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))
        self.when = when

    def configure_model(self) -> None:
        if self.when == "configure_model":
            with torch.no_grad():
                self.net(torch.zeros(1, 6))


def fit_lazily(when: str) -> float:
    task = Lazy(when)
    quiet_trainer(max_epochs=1, precision=64).fit(task, loader(8, 4))
    return task.net[0].weight.sum().item()


def test_parameters_without_a_shape_are_named_with_the_remedy() -> None:
    for error in [*errors_of_ranks(fit_lazily, 2, "never"), *errors_of_ranks(fit_lazily, 1, "never")]:
        assert "net.0 (LazyLinear) has no shapes yet" in error
        assert "in configure_model" in error
    with pytest.raises(ValueError, match=r"net\.0 \(LazyLinear\) has no shapes yet"):
        quiet_trainer(precision=64).validate(Lazy("never"), loader(8, 4))


def test_a_made_up_batch_in_configure_model_gives_them_one() -> None:
    first, second = run_ranks(fit_lazily, 2, "configure_model")
    assert first == second


def test_a_checkpoint_gives_them_one_too(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, precision=64)
    trainer.fit(Lazy("configure_model"), loader(8, 4))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    quiet_trainer(precision=64).validate(Lazy("never"), loader(8, 4), ckpt_path=tmp_path / "checkpoint", verbose=False)


# --- ranks at different places ---------------------------------------------------------------


def save_on_rank_0_in(hook: str) -> None:
    def save(self: Any) -> None:
        if self.trainer.is_global_zero and self.trainer.training | self.trainer.validating:
            self.trainer.save_checkpoint("checkpoint")

    kind = type("SavesAlone", (Regression,), {hook: save})
    quiet_trainer(max_epochs=2, precision=64, num_sanity_val_steps=0).fit(kind(), loader(16, 4), loader(8, 4))


@pytest.mark.parametrize(
    "hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end"]
)
def test_a_checkpoint_that_one_rank_saves_alone_ends_all_and_says_why(hook: str, tmp_path: Path) -> None:
    errors = errors_of_ranks(save_on_rank_0_in, 2, hook, timeout=50)
    told = [error for error in errors if "the ranks are at different places" in error]
    assert told
    assert "parameters of the checkpoint (rank 0)" in told[0]
    assert "(rank 1)" in told[0]
    assert "not under `if trainer.is_global_zero:`" in told[0]


def many_collectives() -> list[int]:
    trainer = quiet_trainer(max_epochs=1, precision=64)
    trainer.fit(Regression(), loader(8, 4))
    return [trainer.strategy.gather_objects(number, name=f"number {number}")[0] for number in range(250)]


def test_the_names_of_many_collectives_are_compared_and_forgotten() -> None:
    assert run_ranks(many_collectives, 2) == [list(range(250))] * 2


# --- leaving ---------------------------------------------------------------------------------

LEAVES = """
import os
from samestep.strategies import process_groups
from tasks import *

def threads():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return names.count("pt_gloo_runloop")

trainer = quiet_trainer(max_epochs=2, strategy="ddp")
trainer.fit(ScalarWeight(), DataLoader(torch.ones(4), 1))
before = threads()
ABANDON
process_groups.leave()
print(before - threads(), trainer.strategy.world_size)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize(("abandoned", "ended"), [(False, 2), (True, 0)])
def test_leaving_ends_the_threads_of_gloo_though_the_trainer_is_still_there(abandoned: bool, ended: int) -> None:
    code = LEAVES.replace("ABANDON", "process_groups.abandon()" if abandoned else "")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.stdout == f"{ended} 1\n", done.stderr
    assert done.stderr == ""


OWN_GROUP = """
import torch.distributed as dist
from tasks import *

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
trainer = quiet_trainer(max_epochs=1, strategy="ddp")
trainer.fit(ScalarWeight(), DataLoader(torch.ones(4), 1))
from samestep.strategies import process_groups
process_groups.leave()
print(dist.is_initialized(), dist.get_world_size())
dist.destroy_process_group()
"""


def test_a_process_group_of_the_programs_own_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_GROUP], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.stdout == "True 1\n", done.stderr
    assert done.stderr == ""
