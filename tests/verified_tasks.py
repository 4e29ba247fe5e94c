"""Functions that train, some of which can't be resumed exactly, for the tests of verify-resume."""

from __future__ import annotations

import os
from typing import Any

import torch
from samestep.callbacks import Callback, EarlyStopping
from tasks import Regression, loader, numbers, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Dropout(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss


class Counts(Dropout):
    """A weight of the loss that grows with each call, and that no checkpoint holds."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.calls)


class OwnGenerator(Dropout):
    """Noise from a generator of its own, on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return self.loss((x + 0.1 * noise * self.trainer.global_rank, y))


class Chance(Dropout):
    """Another loss in each run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)


class Drifts(Callback):
    """Changes a weight by something that no checkpoint holds."""

    drift = 0.0

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.drift += 2.0**-20
        with torch.no_grad():
            task.net[0].bias += self.drift


class CountsReads(Dataset[Any]):
    """Samples that depend on how often they were read."""

    def __init__(self) -> None:
        self.numbers, self.reads = numbers(24), 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = self.numbers[index]
        return x + 0.01 * self.reads, y


def fit(task: Regression, data: Any = None, *callbacks: Callback) -> None:
    trainer = quiet_trainer(max_epochs=10, precision=64, callbacks=[EarlyStopping("val/loss", patience=50), *callbacks])
    trainer.fit(task, data or loader(24, 2, shuffle=True), loader(4, 2))


def right() -> None:
    fit(Dropout())


def counts() -> None:
    fit(Counts())


def own_generator() -> None:
    fit(OwnGenerator())


def chance() -> None:
    fit(Chance())


def drifts() -> None:
    fit(Dropout(), None, Drifts())


def counts_reads() -> None:
    fit(Dropout(), DataLoader(CountsReads(), 2))


def fails() -> None:
    raise OSError("the disk is gone")
