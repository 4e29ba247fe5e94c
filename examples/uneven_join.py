"""Ranks with different amounts of data, as when files are shared out: no rank hangs, no image is left out.

    python examples/uneven_join.py                                              one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/uneven_join.py            two ranks: 27 % and 73 % of the images
    python examples/uneven_join.py trainer.devices=2 uneven_inputs=stop         each epoch ends with the shorter rank
    python examples/uneven_join.py trainer.devices=2 uneven_inputs=error        an error that says how many each has

`uneven_inputs="join"` goes on until all ranks have run out. A rank that has, still takes part in every step, with a
gradient of zero, so that all end with the same weights.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from samestep.strategies import DDPStrategy
from samestep.trainer import DataModule, Task, Trainer, TrainerConfig, from_command_line
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=10, seed=1, log_every_n_steps=10))
    uneven_inputs: Literal["stop", "join", "error"] = "join"
    files: int = 12
    batch_size: int = 16  # of one rank
    learning_rate: float = 2e-3


class FilesOfRank:
    """This rank's batches, from the files that are its own. No DataLoader, so the trainer takes it as it is."""

    def __init__(self, images: Tensor, targets: Tensor, batch_size: int, seed: int) -> None:
        self.images, self.targets, self.batch_size, self.seed = images, targets, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for part in order.split(self.batch_size):
            yield self.images[part], self.targets[part]


class FilesOfDigits(DataModule):
    """scikit-learn's digits in files of which the last is as many times as large as the first as there are files."""

    trainer: Trainer

    def __init__(self, files: int, batch_size: int) -> None:
        self.files, self.batch_size = files, batch_size

    def setup(self, stage: str) -> None:
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8], from 0 to 1
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.targets = images[order], torch.tensor(digits.target)[order]
        self.held_out = len(images) // 5

    def train_dataloader(self) -> FilesOfRank:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        # File k ends at a share of k(k+1) / n(n+1) of the images. The first ranks get the small files.
        first, end = (self.files * number // ranks for number in (rank, rank + 1))
        left = len(self.images) - self.held_out
        start, stop = (self.held_out + left * k * (k + 1) // (self.files * (self.files + 1)) for k in (first, end))
        return FilesOfRank(self.images[start:stop], self.targets[start:stop], self.batch_size, seed=1000 * rank)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.images[: self.held_out], self.targets[: self.held_out]), 128)


class Digits(Task):
    """A small convolutional network that counts the images it is trained on."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.batches_seen = self.images_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        self.batches_seen += 1  # where this rank has no data left, its step comes without a call of this method
        self.images_seen += len(images)
        loss = nn.functional.cross_entropy(self.net(images), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        self.accuracy(self.net(images), targets)
        self.log("val/acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def digest(task: Task) -> str:
    """The same for the same weights, to the bit."""
    numbers = torch.cat([parameter.detach().flatten() for parameter in task.parameters()]).cpu().numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:12]


def main() -> None:
    options = from_command_line(Options())
    trainer = Trainer(options.trainer, strategy=DDPStrategy(uneven_inputs=options.uneven_inputs))
    task = Digits(options.learning_rate)
    trainer.fit(task, datamodule=FilesOfDigits(options.files, options.batch_size))

    # From here on the program runs on every rank; each tells what it saw.
    mine = (task.batches_seen, task.images_seen, digest(task))
    ranks = trainer.strategy.gather_objects(mine, name="what each rank saw")
    for rank, (batches, images, weights) in enumerate(ranks):
        trainer.print(f"rank {rank}   {batches} batches, {images} images, weights {weights}")
    trainer.print(f"steps    {trainer.global_step}")
    trainer.print(f"weights  {'the same on all ranks' if len({rank[2] for rank in ranks}) == 1 else 'DIFFERENT'}")
    if "val/acc" in trainer.callback_metrics:
        trainer.print(f"val/acc  {trainer.callback_metrics['val/acc']:.4f}")


if __name__ == "__main__":
    main()
