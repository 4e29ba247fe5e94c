"""A generative adversarial network, as a Lightning user writes it: only the import lines are Samestep's."""

import math

import torch
import torch.nn.functional as F
from samestep.callbacks import Callback
from samestep.trainer import Task as LightningModule
from samestep.trainer import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_images(count, seed):
    """Images of 1×6×6 pixels from -1 to 1, bright in the middle, and a label nobody needs."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    dot = torch.exp(-((rows - 2.5) ** 2 + (columns - 2.5) ** 2) / 4) * 2 - 1
    images = (dot + 0.1 * torch.randn(count, 1, 6, 6, generator=generator)).clamp(-1, 1)
    return TensorDataset(images, torch.zeros(count, dtype=torch.long))


class Generator(nn.Module):
    def __init__(self, latent_dim, img_shape):
        super().__init__()
        self.img_shape = img_shape

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(latent_dim, 16, normalize=False), *block(16, 32), nn.Linear(32, math.prod(img_shape)), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(math.prod(img_shape), 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1)
        )

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class GAN(LightningModule):
    def __init__(
        self,
        img_shape: tuple = (1, 6, 6),
        lr: float = 0.002,
        b1: float = 0.5,
        b2: float = 0.999,
        latent_dim: int = 8,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False

        self.generator = Generator(latent_dim=self.hparams.latent_dim, img_shape=img_shape)
        self.discriminator = Discriminator(img_shape=img_shape)

        self.validation_z = torch.randn(8, self.hparams.latent_dim)
        self.example_input_array = torch.zeros(2, self.hparams.latent_dim)

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        sched_g, sched_d = self.lr_schedulers()

        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)

        # train the generator: its images are to pass for real ones
        self.toggle_optimizer(opt_g)
        self.generated_imgs = self(z)
        g_loss = self.adversarial_loss(self.discriminator(self.generated_imgs), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        # train the discriminator: tell real images from generated ones
        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.log_dict({"d_loss": d_loss, "d_loss_real": real_loss, "d_loss_fake": fake_loss}, prog_bar=True)
        if self.trainer.is_last_batch:
            sched_g.step()
            sched_d.step()
        return {"g_loss": g_loss, "d_loss": d_loss}

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], [torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.95) for opt in (opt_g, opt_d)]

    def on_train_epoch_end(self):
        z = self.validation_z.type_as(self.generator.model[0].weight)
        grid = torch.cat(list(self(z)), dim=2)
        for logger in self.loggers:
            logger.experiment.add_image("generated_images", grid, self.current_epoch)


class Watch(Callback):
    """Keeps the losses of every batch, and checks that each backward leaves the other network alone."""

    def __init__(self):
        super().__init__()
        self.g_losses, self.d_losses, self.steps = [], [], 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        assert all(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.g_losses.append(outputs["g_loss"].item())
        self.d_losses.append(outputs["d_loss"].item())


@torch.no_grad()
def distance(model, images):
    """How far the mean generated image is from the mean real one, per pixel."""
    z = torch.randn(256, model.hparams.latent_dim, generator=torch.Generator().manual_seed(5))
    return (model(z.to(model.device, model.dtype)).cpu().mean(0) - images.mean(0)).abs().mean().item()


def main(trainer_options):
    seed_everything(42)
    model = GAN()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    watch = Watch()
    images = make_images(256, seed=1)
    untrained = distance(model, images.tensors[0])
    trainer = Trainer(max_epochs=10, log_every_n_steps=4, callbacks=[watch], **trainer_options)
    trainer.fit(model, DataLoader(images, batch_size=16, shuffle=True, drop_last=True))
    return {
        "distances": (untrained, distance(model, images.tensors[0])),
        "g_losses": watch.g_losses,
        "d_losses": watch.d_losses,
        "optimizer_steps": watch.steps,
        "epochs": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "before": before,
        "after": {name: value.detach().clone() for name, value in model.named_parameters()},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


if __name__ == "__main__":
    print(main({})["metrics"])
