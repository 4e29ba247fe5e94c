"""A callback of one's own: how large each update is beside the weights that it changes.

    python examples/custom_callback.py                                          one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/custom_callback.py        two ranks
    python examples/custom_callback.py learning_rate=300                        too much: the callback ends the run

`UpdateRatio` stands in one list with the built-in callbacks; it uses hooks, `task.log` and `trainer.stop`.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from samestep.callbacks import Callback, EarlyStopping, JSONLLogger, ModelCheckpoint
from samestep.trainer import Task, Trainer, TrainerConfig, from_command_line
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=5, seed=1, log_every_n_steps=8))
    batch_size: int = 32  # of one rank
    learning_rate: float = 0.3
    stop_above: float = 0.5  # an update of half the weights' size is no training any more


class UpdateRatio(Callback):
    """Logs ‖new − old‖ / ‖old‖ of each weight matrix at the steps that are logged, and stops where it is too large."""

    def __init__(self, stop_above: float) -> None:
        self.stop_above = stop_above
        self.ratios: dict[str, Tensor] = {}  # of the last step that was logged
        self._old: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: torch.optim.Optimizer) -> None:
        if (trainer.global_step + 1) % trainer.config.log_every_n_steps == 0:  # other steps cost nothing
            self._old = {name: weight.detach().clone() for name, weight in task.named_parameters() if weight.dim() > 1}

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, old in self._old.items():
            # It stays on its device, so that nothing waits for it.
            self.ratios[name] = (task.get_parameter(name).detach() - old).norm() / old.norm()
            task.log(f"update/{name}", self.ratios[name])
        self._old = {}

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        for name, ratio in self.ratios.items():
            if not ratio < self.stop_above:  # NaN is not below it, either
                trainer.stop(f"an update of {name} was {ratio:.3g} times its size")


class Quadrants(Task):
    """Learns in which of the four quadrants a point lies."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, quadrants = batch
        return nn.functional.cross_entropy(self.net(points), quadrants)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        points, quadrants = batch
        self.log("val/acc", (self.net(points).argmax(1) == quadrants).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def make_points(count: int, seed: int) -> TensorDataset:
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def main() -> None:
    options = from_command_line(Options())
    updates, best = UpdateRatio(options.stop_above), ModelCheckpoint(monitor="val/acc", mode="max")
    callbacks = [updates, best, EarlyStopping("val/acc", mode="max")]
    trainer = Trainer(options.trainer, callbacks=callbacks, logger=JSONLLogger())
    train = DataLoader(make_points(2048, seed=0), options.batch_size, shuffle=True)
    trainer.fit(Quadrants(options.learning_rate), train, DataLoader(make_points(512, seed=1), 128))
    for name, ratio in updates.ratios.items():
        trainer.print(f"update/{name}  {ratio:.5f}")
    trainer.print(f"val/acc  {best.best_model_score:.4f}")
    trainer.print(f"metrics  {trainer.run_folder / 'metrics.jsonl'}")


if __name__ == "__main__":
    main()
