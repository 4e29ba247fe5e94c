"""Ranks that are killed and started again end with the parameters of the run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_ranks import run_ranks  # noqa: F401  # lets the server of the processes import torch once, for all restarts
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import Trainer
from tasks import Regression, loader, parameters_of, quiet_trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

STEPS = 48


def train(folder: str, faults: str) -> tuple[int, Any]:
    """Six epochs of 8 steps, with a checkpoint after every step; returns the restarts and the state at the end."""
    os.environ["SAMESTEP_CHAOS"] = faults  # the server of the processes has the environment of its start
    keep = ModelCheckpoint(every_n_train_steps=1)
    trainer = quiet_trainer(
        max_epochs=6, precision=64, seed=1, enable_checkpointing=True, callbacks=[keep], default_root_dir=folder,
        log_every_n_steps=1, val_check_interval=3,
    )  # fmt: skip
    task = Regression()
    trainer.fit(task, loader(32, 2, shuffle=True), loader(8, 2), ckpt_path="auto")
    momentum = [state["momentum_buffer"].tolist() for state in trainer.optimizers[0].state.values()]
    state = parameters_of(task).tolist(), momentum, trainer.progress.state_dict()
    return trainer.strategy.environment.restart, state


def launch(folder: str, faults: str, restarts: int) -> dict[int, tuple[int, Any]]:
    """What torchrun does, with processes that need not import torch anew."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=folder, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="forkserver", max_restarts=restarts, monitor_interval=0.02,
    )  # fmt: skip
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        return elastic_launch(config, train)(folder, faults)
    finally:
        for number, handler in before.items():  # torch's launcher leaves its own
            signal.signal(number, handler)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_whose_ranks_are_killed_again_and_again_ends_like_one_that_was_not(kills: int) -> None:
    draw = random.Random(5)
    steps = sorted(draw.randrange(STEPS) for _ in range(kills))  # some twice: killed again in the step it came back to
    phases = ("training", "backward", "saving", "writing")
    faults = [
        f"kill rank={draw.randrange(2)} step={step} restart={restart} phase={draw.choice(phases)}"
        for restart, step in enumerate(steps)
    ]
    whole = launch("whole", "", 0)
    disturbed = launch("disturbed", ";".join(faults), kills)
    assert [restart for restart, _ in disturbed.values()] == [kills, kills]
    assert disturbed[0][1] == disturbed[1][1] == whole[0][1] == whole[1][1]


PROGRAM = """
from samestep.callbacks import ModelCheckpoint
from tasks import *

if __name__ == "__main__":
    keep = ModelCheckpoint(every_n_train_steps=1)
    trainer = quiet_trainer(max_epochs=2, devices=2, max_restarts=1, enable_checkpointing=True, callbacks=[keep])
    task = ScalarWeight()
    trainer.fit(task, DataLoader(torch.ones(8), 1), ckpt_path="auto")
    trainer.print("restarts", trainer.strategy.environment.restart, "weight", task.w.item())
"""


def test_ranks_that_a_trainer_started_are_started_again(tmp_path: Path) -> None:
    Path("program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=110,
        env={
            **os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "TMPDIR": os.getcwd(),
            "SAMESTEP_CHAOS": "kill rank=1 step=5",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming from runs/" in done.stdout
    assert done.stdout.splitlines()[-1] == "restarts 1 weight -7.0"
    assert len(os.listdir("runs")) == 1  # the restart found the folder of its job


def test_restarts_without_ranks_to_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_restarts=1 on one process, which nobody starts again"):
        quiet_trainer(max_restarts=1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="max_restarts=1, but torchrun was started with --max-restarts=3"):
        quiet_trainer(max_restarts=1)
    assert isinstance(quiet_trainer(max_restarts=3), Trainer)
