"""Handwritten digits: scikit-learn's 1,797 real 8×8 images, a small CNN, at least 98 % right on the fifth held out.

    python examples/digits.py                                                   one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/digits.py                 two ranks
    python examples/digits.py trainer.devices=2 trainer.max_epochs=3            the same from plain Python, shorter
    PROCESSES=2 examples/launch/one_node.sh examples/digits.py                  two ranks, started again if one dies

Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from samestep.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from samestep.trainer import DataModule, Task, Trainer, TrainerConfig, from_command_line
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=15, seed=1, log_every_n_steps=10))
    batch_size: int = 32  # of one rank
    learning_rate: float = 4e-3
    warmup: float = 0.1  # share of all steps
    ckpt_path: str | None = None  # "auto": go on in trainer.default_root_dir, if a checkpoint is there


class DigitsData(DataModule):
    """1,438 images to train on, 359 to test on: the same split on every rank, by a seed of its own."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8], from 0 to 1
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
        targets = torch.tensor(digits.target)
        self.train: Dataset[Any] = TensorDataset(images[rest], targets[rest])
        self.val: Dataset[Any] = TensorDataset(images[held_out], targets[held_out])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 128)


class Digits(Task):
    """Two convolutions with BatchNorm and a linear layer."""

    def __init__(self, learning_rate: float, warmup: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        loss = nn.functional.cross_entropy(self(images), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        logits = self(images)
        self.accuracy(logits, targets)
        self.log("val/loss", nn.functional.cross_entropy(logits, targets))
        self.log("val/acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        warmup = max(1, round(steps * self.hparams.warmup))

        def factor(step: int) -> float:
            """Up in a straight line, then down along half a cosine."""
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    options = from_command_line(Options())
    best = ModelCheckpoint(monitor="val/acc", mode="max", filename="{epoch}-{val/acc:.4f}")
    callbacks = [best, EarlyStopping("val/acc", mode="max", patience=6), LearningRateMonitor()]
    trainer = Trainer(options.trainer, callbacks=callbacks)
    task, data = Digits(options.learning_rate, options.warmup), DigitsData(options.batch_size)
    trainer.fit(task, datamodule=data, ckpt_path=options.ckpt_path)

    # From here on the program runs on every rank.
    if best.best_model_path:
        task = Digits.load_from_checkpoint(best.best_model_path)
        result = trainer.validate(task, datamodule=data, verbose=False)[0]
        trainer.print(f"val/acc      {result['val/acc']:.4f}")
        trainer.print(f"checkpoint   {best.best_model_path}")
        trainer.print(f"TensorBoard  tensorboard --logdir {trainer.run_folder}")


if __name__ == "__main__":
    main()
