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
from samestep.trainer import CheckpointError, Trainer
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


def build(folder: str, **options: Any) -> Trainer:
    strategy = DDPStrategy(timeout=timedelta(seconds=4), startup_timeout=timedelta(seconds=8))
    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    return quiet_trainer(**{
        "max_epochs": 2, "precision": 64, "seed": 1, "enable_checkpointing": True, "default_root_dir": folder,
        "strategy": strategy, "callbacks": [keep], "num_sanity_val_steps": 1, "val_check_interval": 3, **options,
    })  # fmt: skip


def train(folder: str, workers: int | None = None) -> None:
    data = loader(32, 2) if workers is None else DataLoader(Broken(), 2, num_workers=workers)
    build(folder).fit(Regression(), data, loader(8, 2), ckpt_path="auto")


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
