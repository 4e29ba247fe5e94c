"""Signals: all ranks save at the same step and leave, and the run goes on from there as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_ranks import end_ranks
from run_ranks import run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.trainer import Interrupted, Preempted, Trainer, control
from samestep.trainer.checkpoint import newest_intact
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch.utils.data import DataLoader


class Draws(Regression):
    """Its steps and validations draw random numbers, so that one drawn too often is seen in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace.append(f"step {self.global_step}")
        x, y = batch
        return self.loss((x + 0.1 * torch.randn_like(x), y))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            self.trace.append(f"validation {self.global_step}")
        self.log("val/loss", self.loss(batch) + torch.randn((), dtype=torch.float64))


class StepEnds(Callback):
    """Notes when a step's end comes."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        task.trace.append(f"end {trainer.global_step}")


def train(folder: str, faults: str, **options: Any) -> tuple[Any, Draws, Trainer]:
    """One fit of two epochs of 8 steps; returns how it ended (None: whole), the task and the trainer."""
    os.environ["SAMESTEP_CHAOS"] = faults
    task = Draws()
    keep = ModelCheckpoint(monitor="val/loss", every_n_train_steps=4, save_top_k=-1)
    trainer = quiet_trainer(**{
        "max_epochs": 2, "precision": 64, "seed": 1, "enable_checkpointing": True, "default_root_dir": folder,
        "callbacks": [StepEnds(), keep], "val_check_interval": 3, **options,
    })  # fmt: skip
    data = loader(16 * trainer.world_size, 2, shuffle=True), loader(8 * trainer.world_size, 2)
    try:
        trainer.fit(task, *data, ckpt_path="auto")
    except Preempted as end:
        return end, task, trainer
    return None, task, trainer


def state_of(task: Draws, trainer: Trainer) -> Any:
    return parameters_of(task).tolist(), trainer.progress.state_dict(), float(trainer.callback_metrics["val/loss"])


def leave_and_go_on(cases: list[str], options: dict[str, Any]) -> list[Any]:
    """For each faults: how the run ended, what is in its folder, what a whole run comes to, and what the resumed one does."""
    control.PERIOD = 0.0  # a word after every step: these steps are so fast that an epoch takes no second
    results: list[Any] = []
    _, task, trainer = train("whole", "", **options)
    whole, trace = state_of(task, trainer), task.trace
    for number, faults in enumerate(cases):
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        end, first, ended = train(f"run-{number}", faults, **options)
        assert {each: signal.getsignal(each) for each in before} == before
        assert end is not None, faults
        _, second, resumed = train(f"run-{number}", "", **options)
        while first.trace and first.trace[-1].startswith("validation"):
            first.trace.pop()  # cut short, and done again
        results.append({
            "faults": faults, "code": end.code, "step": ended.global_step, "kind": type(end).__name__, "text": str(end),
            "same state": state_of(second, resumed) == whole, "same trace": first.trace + second.trace == trace,
            "traces": (first.trace, second.trace, trace),
        })  # fmt: skip
    return results


CASES = [
    ("term rank=RANK step=3", 143, "Preempted"),
    ("usr1 rank=RANK step=8", 143, "Preempted"),  # the first step of the second epoch
    ("int rank=RANK step=6", 130, "Interrupted"),
    ("term step=4", 143, "Preempted"),  # on all
    ("term rank=RANK step=7", 143, "Preempted"),  # in the epoch's last step
    ("term rank=RANK step=4; term rank=RANK step=4", 143, "Preempted"),
    ("term rank=RANK step=4 phase=saving", 143, "Preempted"),
    ("term rank=RANK phase=sanity", 143, "Preempted"),
    ("term rank=RANK step=3 phase=validation", 143, "Preempted"),
    ("int rank=RANK step=11 phase=validation", 130, "Interrupted"),
]


@pytest.mark.parametrize(("ranks", "place"), [(1, "0"), (2, "0"), (2, "1")])
def test_a_signal_on_any_rank_ends_all_at_one_step_and_the_run_goes_on_as_if_nothing_had_been(
    ranks: int, place: str, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    cases = [faults.replace("RANK", place) for faults, _, _ in CASES]
    every = run_ranks(leave_and_go_on, ranks, cases, {}, timeout=100)
    for rank, results in enumerate(every):
        for result, (_, code, kind) in zip(results, CASES, strict=True):
            assert (result["code"], result["kind"]) == (code, kind), result
            assert result["same state"], result
            assert result["same trace"], result
            assert result["step"] == every[0][results.index(result)]["step"], rank
            assert "saved in run-" in result["text"]


AT_THE_END = ["term rank=0 step=7", "term rank=0 step=8 phase=validation", "term rank=0 step=16 phase=validation"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_validation_at_an_epochs_end_lets_it_be_done_again(ranks: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for results in run_ranks(leave_and_go_on, ranks, AT_THE_END, {"val_check_interval": 1.0}, timeout=100):
        assert [result["step"] for result in results] == [8, 8, 16]
        for result in results:
            assert result["same state"], result
            assert result["same trace"], result
