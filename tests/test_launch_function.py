"""Ranks from a program of one's own: what a notebook or a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from samestep.strategies import launch_function

MODULE = """
import torch
from samestep.trainer import Task, Trainer
from torch.utils.data import DataLoader

class Scalar(Task):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))
    def training_step(self, batch, batch_idx):
        return (self.w * batch * (1 + 2 * self.global_rank)).mean()
    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=1.0)

def train(samples):
    task = Scalar()
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, accelerator="cpu")
    trainer.fit(task, DataLoader(torch.ones(samples), 1))
    return trainer.global_rank, trainer.world_size, task.w.item()

def fail():
    raise ValueError("this rank fails")
"""
PROGRAM = """
from module import fail, train
from samestep.strategies import launch_function

if __name__ == "__main__":
    print(launch_function(train, 2, 4))
    print(launch_function(train, 1, 2))
    try:
        launch_function(fail, 2)
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_function_runs_as_ranks_and_returns_what_each_returned(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory() as temporary:  # not in tmp_path: the names of sockets may have 107 characters
        result = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env={**os.environ, "TMPDIR": temporary},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        left = [path for path in Path(temporary).iterdir() if path.name.startswith("samestep")]
    assert result.stdout.splitlines() == ["[(0, 2, -3.0), (1, 2, -3.0)]", "[(0, 1, -1.0)]", "ChildFailedError"], (
        result.stderr
    )
    assert not left


def test_what_can_not_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="can't be sent to another process"):
        launch_function(lambda: None, 2)
    with pytest.raises(ValueError, match="processes=0"):
        launch_function(test_what_can_not_be_sent_is_refused, 0)
