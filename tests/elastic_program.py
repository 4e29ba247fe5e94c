"""A run on a changing number of hosts that notes which samples each of its steps has taken, for `test_elastic_agents.py`.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 … tests/elastic_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from samestep.callbacks import ModelCheckpoint
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader

SAMPLES, BATCH, EPOCHS = 400, 2, 2  # a batch of a rank, on the number of hosts that the run begins with
PAUSE = {1: 0.5, 2: 0.1}
"""Seconds that a step takes, by the number of ranks: one that is alone is still there when the other is back."""


class Noted(NamedTuple):
    """What one process has noted."""

    ranks: int
    rank: int
    agent: int
    process: int
    steps: list[tuple[int, int, list[float]]]
    """Epoch, step, samples."""


class Noting(ScalarWeight):
    """Appends a line for each batch whose step was taken, to a file of this process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lr=1e-4)
        self.folder = folder

    def on_train_start(self) -> None:
        where = (self.trainer.world_size, self.trainer.global_rank, os.getppid(), os.getpid())
        name = "-".join(["samples", f"{time.time():.3f}", *map(str, where)])
        self.notes = (self.folder / name).open("w", buffering=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.write(json.dumps([self.trainer.current_epoch, self.global_step, batch.tolist()]) + "\n")
        time.sleep(PAUSE[self.trainer.world_size])


def noted_in(folder: Path) -> list[Noted]:
    """What all processes have noted, in the order in which they began."""
    found: list[Noted] = []
    for path in sorted(folder.glob("samples-*"), key=lambda path: float(path.name.split("-")[1])):
        lines = [line for line in path.read_text().splitlines() if line.endswith("]]")]  # the last may be half a line
        found.append(Noted(*map(int, path.name.split("-")[2:]), steps=[json.loads(line) for line in lines]))
    return found


def lineage(folder: Path) -> list[Counter[float]]:
    """How often each sample of each epoch is in the weights: of a step that was lost, those that it took when taken again."""
    steps: dict[int, dict[int, Any]] = {}
    ranks_of: dict[int, int] = {}
    for ranks, rank, _, _, noted in noted_in(folder):
        for epoch, step, samples in noted:
            if rank in steps.get(step, {}) or ranks_of.get(step) != ranks:
                steps[step], ranks_of[step] = {}, ranks
            steps[step][rank] = epoch, samples
    assert sorted(steps) == list(range(1, len(steps) + 1))
    epochs = [Counter[float]() for _ in range(EPOCHS)]
    for step, parts in steps.items():
        assert sorted(parts) == list(range(ranks_of[step])), f"step {step} was not taken by all ranks"
        for epoch, samples in parts.values():
            epochs[epoch].update(samples)
    return epochs


def main(folder: Path) -> None:
    """Train all epochs, or what is left of them."""
    trainer = quiet_trainer(
        max_epochs=EPOCHS, seed=7, default_root_dir=folder, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=5)],
    )  # fmt: skip
    loader = DataLoader(torch.arange(float(SAMPLES)), BATCH, shuffle=True)
    trainer.fit(Noting(folder), loader, ckpt_path="auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
