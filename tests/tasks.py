"""Small tasks and data that many tests share."""

from __future__ import annotations

from typing import Any

import torch
from samestep.trainer import Task, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(Task):
    """A small network on made-up numbers, in float64 where the trainer says so."""

    def __init__(self, momentum: float = 0.9, lr: float = 0.05) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.momentum, self.lr = momentum, lr

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class ScalarWeight(Task):
    """One weight w, from 1; the loss of a batch is the mean of w·x. SGD with lr 1: an update is the gradient."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=self.lr)


def numbers(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1) + 0.1 * torch.randn(samples, generator=generator, dtype=torch.float64))


def loader(samples: int, batch_size: int, *, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbers(samples), batch_size, shuffle=shuffle, **options)


def quiet_trainer(**options: Any) -> Trainer:
    """A trainer that shows and writes nothing unless it is asked to."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **options})


def parameters_of(task: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in task.parameters()])
