"""Nothing hangs in silence: who waits for whom is said within seconds, by rank, phase, place and stack."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.strategies import DDPStrategy
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader, Dataset

LIMIT = 2.0
STEPS = 6
STALLED = 3  # the batch at which a rank stalls


class Told:
    """Whether a rank has printed what is wrong. Each rank's stderr is a file in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> bool:
        return any("no progress for" in path.read_text() for path in self.folder.glob("stderr-*"))

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while not self() and time.monotonic() < deadline:
            time.sleep(0.05)


def sleeps(told: Told) -> None:
    told.wait()  # the line of the user's that is named


def loops(told: Told) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if int(time.monotonic() * 100) % 10 == 0 and told():
            return


def locks(told: Told) -> None:
    lock = threading.Lock()
    lock.acquire()
    helper = threading.Thread(target=lambda: (told.wait(), lock.release()))
    helper.start()
    lock.acquire()
    helper.join()


def stops(told: Told) -> None:
    process = os.getpid()
    if (helper := os.fork()) == 0:
        os.kill(process, signal.SIGSTOP)
        told.wait()
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)


class Stalls(ScalarWeight):
    """One rank stalls in a step."""

    def __init__(self, where: str, rank: int, stall: Callable[[], None]) -> None:
        super().__init__(lr=0.01)
        self.where, self.stalling, self.stall = where, rank, stall

    def stall_in(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == STALLED and self.global_rank == self.stalling:
            self.stall()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stall_in("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stall_in("on_train_batch_end", batch_idx)


class StallingData(Dataset[Any]):
    def __init__(self, rank: int, stall: Callable[[], None] | None) -> None:
        self.rank, self.stall = rank, stall

    def __len__(self) -> int:
        return 3 * STEPS

    def __getitem__(self, index: int) -> Any:
        if self.stall is not None and index == 3 * STALLED + self.rank:
            self.stall()
        return torch.ones(())


def report_of(folder: Path, where: str, rank: int, stall: Callable[[Told], None], workers: int = 0) -> None:
    """Train on this rank, with one that stalls until that is told."""
    own = int(os.environ["RANK"])
    folder.mkdir(exist_ok=True)
    told = Told(folder)
    before = sys.stderr
    with (folder / f"stderr-{own}").open("w", buffering=1) as sys.stderr:
        data = StallingData(rank, partial(stall, told)) if where == "data" else StallingData(rank, None)
        loader = DataLoader(data, 1, num_workers=workers, multiprocessing_context="fork" if workers else None)
        trainer = quiet_trainer(max_epochs=1, hang_timeout=LIMIT, strategy=DDPStrategy(timeout=timedelta(seconds=60)))
        trainer.fit(Stalls(where, rank, partial(stall, told)), loader)
        assert trainer.global_step == STEPS
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep hang")]
    sys.stderr = before


CASES: dict[str, tuple[Any, ...]] = {
    "sleep": ("training_step", 1, sleeps),
    "loop": ("training_step", 2, loops),
    "lock": ("on_train_batch_end", 1, locks),
    "data": ("data", 1, sleeps),
    "worker": ("data", 1, sleeps, 1),
    "stopped": ("training_step", 1, stops),
    "rank 0": ("training_step", 0, sleeps),
    "rank 0 stopped": ("training_step", 0, stops),
}


def some_reports(folder: str, port: int, names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name in names:
        report_of(Path(folder) / name, *CASES[name])


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What all ranks printed, by case."""
    folder = tmp_path_factory.mktemp("hangs")
    run_ranks(some_reports, 3, str(folder), list(CASES), timeout=120)
    return {name: "".join(path.read_text() for path in sorted((folder / name).glob("stderr-*"))) for name in CASES}


def test_show(reports: dict[str, str]) -> None:
    for name, text in reports.items():
        print("=====", name)
        print(text)
    raise AssertionError
