"""A classifier with a LightningDataModule, as a Lightning user writes it: only the import lines are Samestep's."""

import torch
import torch.nn.functional as F
from samestep.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from samestep.trainer import DataModule as LightningDataModule
from samestep.trainer import Task as LightningModule
from samestep.trainer import Trainer, seed_everything
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy


class ClustersDataModule(LightningDataModule):
    """Points of four clusters that overlap a little."""

    def __init__(self, batch_size: int = 16, num_samples: int = 503):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(4, (self.hparams.num_samples,), generator=generator)
        points = 2.5 * F.one_hot(labels, 8) + torch.randn(len(labels), 8, generator=generator)
        torch.save((points, labels), "clusters.pt")

    def setup(self, stage=None):
        dataset = TensorDataset(*torch.load("clusters.pt"))
        self.train_set, self.val_set, self.test_set = random_split(
            dataset, [320, 80, len(dataset) - 400], generator=torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.hparams.batch_size)


class LitClassifier(LightningModule):
    def __init__(self, hidden: int = 32, lr: float = 0.05, schedule: str = "plateau"):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 4))
        self.train_acc = Accuracy(task="multiclass", num_classes=4)
        self.val_acc = Accuracy(task="multiclass", num_classes=4)
        self.test_acc = Accuracy(task="multiclass", num_classes=4)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc.update(logits, y)
        self.log_dict({"test_loss": F.cross_entropy(logits, y), "test_acc": self.test_acc})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        if self.hparams.schedule == "plateau":
            scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=0, threshold=0.05)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        steps = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


class MetricTracker(Callback):
    """Keeps what was logged: a callback of the user's own."""

    def __init__(self):
        super().__init__()
        self.validations, self.epochs, self.rates, self.batches = [], [], [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert outputs["logits"].shape == (len(batch[1]), 4)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.batches += 1

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.validations.append((metrics["val_loss"].item(), metrics["val_acc"].item()))

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.epochs.append((metrics["train_loss_epoch"].item(), metrics["train_acc"].item()))

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


def main(trainer_options, schedule="plateau"):
    seed_everything(7, workers=True)
    dm = ClustersDataModule()
    model = LitClassifier(schedule=schedule)
    tracker = MetricTracker()
    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch:02d}-{val_acc:.3f}", save_last=True)
    early_stopping = EarlyStopping(monitor="val_loss", mode="min", patience=6)
    trainer = Trainer(
        max_epochs=8,
        callbacks=[checkpoint, early_stopping, LearningRateMonitor(logging_interval="step"), tracker],
        log_every_n_steps=5,
        **trainer_options,
    )
    trainer.fit(model, datamodule=dm)
    batches, wait_count = tracker.batches, early_stopping.wait_count
    last = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tested = trainer.test(datamodule=dm, ckpt_path="best")
    best = LitClassifier.load_from_checkpoint(checkpoint.best_model_path)
    return {
        "epochs": tracker.epochs,
        "validations": tracker.validations,
        "rates": tracker.rates,
        "batches": batches,
        "steps": trainer.global_step,
        "estimated_steps": trainer.estimated_stepping_batches,
        "test": tested[0],
        "best_score": checkpoint.best_model_score.item(),
        "best_path": checkpoint.best_model_path,
        "best_weights": {name: value.detach().clone() for name, value in best.state_dict().items()},
        "tested_weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "last_weights": last,
        "hparams": dict(best.hparams),
        "wait_count": wait_count,
    }


if __name__ == "__main__":
    print(main({})["test"])
