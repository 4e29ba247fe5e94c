"""A generative adversarial network on handwritten digits: two optimizers, stepped by hand.

    python examples/gan.py                                                      one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/gan.py                    two ranks
    python examples/gan.py trainer.devices=2 trainer.max_epochs=200             the same from plain Python, longer

With `automatic_optimization = False` the task runs each backward by `self.manual_backward`, which averages the gradients
over the ranks, and steps each optimizer by itself.
A sheet of samples goes to TensorBoard every few epochs, and to `samples.png` in the run's folder at the end.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image  # comes with tensorboard
from samestep.trainer import Task, Trainer, TrainerConfig, from_command_line
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=60, seed=1, log_every_n_steps=20))
    batch_size: int = 32  # of one rank
    learning_rate: float = 2e-3
    latent: int = 16  # numbers that an image is made from
    sheet_every: int = 20  # epochs


class GAN(Task):
    """The generator makes images from noise; the discriminator tells them from real ones."""

    automatic_optimization = False

    def __init__(self, learning_rate: float, latent: int, sheet_every: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(latent, 128), nn.LeakyReLU(0.2), nn.Linear(128, 256), nn.LeakyReLU(0.2),
            nn.Linear(256, 64), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 128), nn.LeakyReLU(0.2),
            nn.Dropout(0.3), nn.Linear(128, 1),
        )  # fmt: skip
        # The same noise for each sheet, drawn from a seed of its own: the sheets can be compared.
        noise = torch.randn(100, latent, generator=torch.Generator().manual_seed(2))
        self.register_buffer("sheet_noise", noise, persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(real), self.hparams.latent, device=self.device)

        # The discriminator's weights need no gradient here: it only passes the generator's on.
        with self.toggled_optimizer(for_generator):
            fake = self(noise)
            generator_loss = self.loss(fake, is_real=True)
            for_generator.zero_grad()
            self.manual_backward(generator_loss)
            for_generator.step()

        with self.toggled_optimizer(for_discriminator):
            # The images of before the generator's step, cut off from its graph.
            discriminator_loss = (self.loss(real, is_real=True) + self.loss(fake.detach(), is_real=False)) / 2
            for_discriminator.zero_grad()
            self.manual_backward(discriminator_loss)
            for_discriminator.step()

        self.log("loss/generator", generator_loss, on_step=True, on_epoch=True)
        self.log("loss/discriminator", discriminator_loss, on_step=True, on_epoch=True)

    def loss(self, images: Tensor, *, is_real: bool) -> Tensor:
        """How far the discriminator is from taking the images for what they are said to be."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def on_train_epoch_end(self) -> None:
        if (self.trainer.current_epoch + 1) % self.hparams.sheet_every == 0 and self.trainer.logger is not None:
            writer = self.trainer.logger.experiment  # on other ranks than 0 it does nothing
            writer.add_image("samples", self.sheet(), self.trainer.global_step, dataformats="HW")

    @torch.no_grad()
    def sheet(self) -> Tensor:
        """Ten rows of ten samples, [100, 100] from 0 to 1."""
        images = self(self.sheet_noise).view(10, 10, 8, 8).add(1).div(2)
        return nn.functional.pad(images, (1, 1, 1, 1)).permute(0, 2, 1, 3).reshape(100, 100)

    def configure_optimizers(self) -> Any:
        networks, rate = (self.generator, self.discriminator), self.hparams.learning_rate
        return [torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.999)) for network in networks]


def distance(images: Tensor, others: Tensor) -> float:
    """Fréchet's, of the normal distributions with the mean and covariance of the images' pixels: 0 for equal ones."""
    (mean, covariance), (other_mean, other_covariance) = ((i.mean(0), i.T.cov()) for i in (images, others))
    # The trace of a matrix' root is the sum of the roots of its eigenvalues, here not negative but for rounding.
    roots = torch.linalg.eigvals(covariance @ other_covariance).real.clamp(min=0).sqrt()
    return float((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * roots.sum())


def main() -> None:
    options = from_command_line(Options())
    trainer = Trainer(options.trainer)
    digits: Any = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1  # [1797, 64] from −1 to 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = images[order[359:]], images[order[:359]]
    labels = torch.tensor(digits.target)[order[359:]]
    task = GAN(options.learning_rate, options.latent, options.sheet_every)
    noise = torch.randn(2000, options.latent, generator=torch.Generator().manual_seed(3))

    @torch.no_grad()
    def samples() -> Tensor:
        return task(noise.to(task.device)).cpu()

    before = samples()
    trainer.fit(task, DataLoader(TensorDataset(train), options.batch_size, shuffle=True, drop_last=True))

    # From here on the program runs on every rank.
    drawn = samples()
    as_digits = labels[torch.cdist(drawn, train).argmin(1)].bincount(minlength=10)
    trainer.print(f"distance  {distance(drawn, held_out):.2f} of samples from images held out")
    trainer.print(f"untrained {distance(before, held_out):.2f}")
    trainer.print(f"real      {distance(train, held_out):.2f} of the training images from those held out")
    trainer.print(
        f"digits    {int((as_digits >= 20).sum())} of 10 drawn, by the nearest image, in 1 % of samples or more"
    )
    if trainer.is_global_zero:
        trainer.run_folder.mkdir(parents=True, exist_ok=True)
        sheet = Image.fromarray(task.sheet().mul(255).byte().cpu().numpy()).resize((600, 600), Image.Resampling.NEAREST)
        sheet.save(trainer.run_folder / "samples.png")
    trainer.print(f"samples   {trainer.run_folder / 'samples.png'}")


if __name__ == "__main__":
    main()
