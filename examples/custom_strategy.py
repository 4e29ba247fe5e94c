"""A strategy of one's own: data parallelism that also measures how large a batch is worth its samples.

    python examples/custom_strategy.py                                          one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/custom_strategy.py        two ranks
    python examples/custom_strategy.py trainer.devices=2 batch_size=8 trainer.accumulate_grad_batches=2

`NoiseScaleStrategy` reduces the gradients by itself, in one message per bucket, and so sees what DistributedDataParallel
hides: the gradient of each rank before the mean. From its size and that of the mean comes the gradient noise scale
(McCandlish and others, 2018, arXiv:1812.06162, appendix A.1): with far fewer samples in a batch, a batch of twice the
size needs half of the steps; with far more, hardly fewer.
The program trains twice, with `NoiseScaleStrategy` and with DDP, and compares the weights.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from samestep.strategies import DDPStrategy, ProcessGroupStrategy, Strategy
from samestep.trainer import Task, Trainer, TrainerConfig, from_command_line
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(max_epochs=5, seed=1, precision="64-true", enable_checkpointing=False)
    )
    batch_size: int = 16  # of one rank
    learning_rate: float = 0.1


class NoiseScaleStrategy(ProcessGroupStrategy):
    """Averages the gradients of all ranks after the last backward of a step, and keeps the sizes of both kinds."""

    name = "noise_scale"

    def wrap(self, step: nn.Module, *, manual: bool = False) -> Callable[..., Any]:
        """All ranks start from rank 0's weights; parameters are dealt to buckets of a million or so numbers."""
        if manual:
            raise ValueError("NoiseScaleStrategy reduces gradients for automatic optimization only.")
        self.broadcast_module(step)
        self.buckets: list[list[nn.Parameter]] = []
        for parameter in filter(lambda parameter: parameter.requires_grad, step.parameters()):
            if not self.buckets or sum(map(torch.numel, self.buckets[-1])) > 1 << 20:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        return step.forward

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Generator[None]:
        """Forward and backward of a micro-batch run inside. Clipping and the update come later: they see the mean."""
        yield
        for bucket in self.buckets if enabled else []:
            self.reduce(bucket)

    def reduce(self, bucket: list[nn.Parameter]) -> None:
        """Average the gradients over the ranks in one message."""
        gradients = [parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None]
        if len(gradients) < len(bucket):
            raise RuntimeError("a parameter got no gradient in this step: expected one for each that requires it.")
        flat = torch.cat(gradients)
        # Each rank's square goes along, so that its mean over the ranks costs no further message.
        flat = self.all_reduce(torch.cat([flat, flat.square().sum().view(1)]), "mean", name="gradients")
        mean, own_square = flat[:-1], flat[-1]
        self.squares += torch.stack([own_square, mean.square().sum()])  # stays on the device: nothing waits for it
        for parameter, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)

    def noise_scale(self, samples: int) -> float:
        """The noise scale in samples, over all steps so far; a rank's gradient in a step is that of so many samples."""
        own, mean = self.squares.tolist()  # E|g|² = |G|² + noise/samples, and that of the mean has W times the samples
        ranks = self.world_size
        return samples * ranks * (own - mean) / (ranks * mean - own) if ranks > 1 else float("nan")


class Digits(Task):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        self.log("val/acc", (self.net(images).argmax(1) == targets).double().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.9)


def train(strategy: Strategy, options: Options) -> tuple[Trainer, Task]:
    digits: Any = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    loaders = [
        DataLoader(TensorDataset(images[part], targets[part]), options.batch_size, shuffle=number == 0)
        for number, part in enumerate(order.split([1438, 359]))
    ]
    trainer = Trainer(options.trainer, strategy=strategy, logger=False)
    task = Digits(options.learning_rate)
    trainer.fit(task, *loaders)
    return trainer, task


def main() -> None:
    options = from_command_line(Options())
    ours, ddp = NoiseScaleStrategy(), DDPStrategy()
    trainer, task = train(ours, options)
    _, same = train(ddp, options)
    pairs = zip(task.state_dict().values(), same.state_dict().values(), strict=True)
    window = options.batch_size * options.trainer.accumulate_grad_batches
    if "val/acc" in trainer.callback_metrics:
        trainer.print(f"val/acc      {trainer.callback_metrics['val/acc']:.4f}")
    trainer.print(f"messages     {ours.collectives['gradients'] / trainer.global_step:g} in a step, of all gradients")
    trainer.print(f"noise_scale  {ours.noise_scale(window):.0f} samples; a step had {window * ours.world_size}")
    trainer.print(f"difference   {max(float((a - b).abs().max()) for a, b in pairs):.1e} at most, from DDP's weights")


if __name__ == "__main__":
    main()
