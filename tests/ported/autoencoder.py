"""An autoencoder, as a Lightning user writes it: only the import lines are Samestep's."""

import torch
import torch.nn.functional as F
from samestep.callbacks import Callback, TensorBoardLogger
from samestep.trainer import Task as LightningModule
from samestep.trainer import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_images(count, seed):
    """Gray images of 8×8 pixels, each with one soft dot, and the dot's place."""
    places = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 7
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    distance = (rows - places[:, :1, None]) ** 2 + (columns - places[:, 1:, None]) ** 2
    return TensorDataset(torch.exp(-distance / 4).unsqueeze(1), places)


class LitAutoEncoder(LightningModule):
    def __init__(self, hidden_dim: int = 32, learning_rate: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))
        self.example_input_array = torch.zeros(2, 64)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, "val")

    def test_step(self, batch, batch_idx):
        self._common_step(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self.encoder(self._flat(batch))

    def on_after_backward(self):
        if self.trainer.global_step % 10 == 0:
            size = self.encoder[0].weight.grad.norm()
            self.logger.experiment.add_scalar("encoder_gradient", size, self.global_step)

    def on_train_epoch_end(self):
        self.logger.experiment.add_histogram("encoder", self.encoder[0].weight, self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _flat(self, batch):
        images, _ = batch
        return images.view(images.size(0), -1)

    def _common_step(self, batch, stage):
        x = self._flat(batch)
        loss = F.mse_loss(self(x), x)
        several = self.trainer.world_size > 1
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=several)
        return loss


class ImageSampler(Callback):
    """Shows a few images of the validation set beside what the autoencoder makes of them."""

    def __init__(self, num_samples=3):
        super().__init__()
        self.num_samples = num_samples

    def on_train_epoch_end(self, trainer, pl_module):
        images, _ = next(iter(DataLoader(make_images(64, seed=2), batch_size=self.num_samples)))
        flat = images.view(images.size(0), -1).to(pl_module.device, pl_module.dtype)
        with torch.no_grad():
            pl_module.eval()
            generated = pl_module(flat).view(images.shape)
            pl_module.train()
        grid = torch.cat([torch.cat(list(images), dim=2), torch.cat(list(generated), dim=2)], dim=1)
        trainer.logger.experiment.add_image("reconstructions", grid, trainer.current_epoch)


class LossHistory(Callback):
    """Keeps the losses of each epoch."""

    def __init__(self):
        super().__init__()
        self.train, self.val = [], []

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.val.append(trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        self.train.append(trainer.callback_metrics["train_loss"].item())


def main(trainer_options):
    seed_everything(1234)
    model = LitAutoEncoder()
    history = LossHistory()
    trainer = Trainer(
        max_epochs=8,
        logger=TensorBoardLogger("tb_logs", name="autoencoder"),
        callbacks=[ImageSampler(), history],
        log_every_n_steps=10,
        **trainer_options,
    )
    test_loader = DataLoader(make_images(100, seed=3), batch_size=32)
    trainer.fit(model, DataLoader(make_images(512, seed=1), batch_size=16), DataLoader(make_images(64, seed=2), 32))
    tested = trainer.test(model, dataloaders=test_loader)
    codes = trainer.predict(model, dataloaders=test_loader)
    return {
        "train_losses": history.train,
        "val_losses": history.val,
        "test_loss": tested[0]["test_loss_epoch"],
        "codes": torch.cat(codes),
        "log_dir": trainer.logger.log_dir,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
    }


if __name__ == "__main__":
    print(main({})["train_losses"])
