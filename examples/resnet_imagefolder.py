r"""ResNet-50 on a folder of images, as one trains it on ImageNet; without a folder of yours, on small painted shapes.

    python examples/resnet_imagefolder.py                                       one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/resnet_imagefolder.py     two ranks
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \
        examples/resnet_imagefolder.py folder=/data/imagenet size=224 batch_size=128 workers=8 \
        compile=before_ddp trainer.max_epochs=90

The folder holds `train/<class>/…` and `val/<class>/…`.
It needs torchvision, in the release that belongs to your torch (0.28 to 2.13) and from the index that torch came from:
`pip install torchvision`, or, beside a torch for CPUs only,
`pip install torchvision --index-url https://download.pytorch.org/whl/cpu`.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image, ImageDraw  # needed by torchvision
from samestep.callbacks import LearningRateMonitor, ModelCheckpoint
from samestep.strategies import DDPStrategy
from samestep.trainer import DataModule, Task, Trainer, TrainerConfig, from_command_line
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    from torchmetrics.classification import MulticlassAccuracy  # which imports torchvision where it is installed
    from torchvision import datasets, models
    from torchvision.transforms import v2
except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
    print(
        f"torchvision for torch {torch.__version__} is needed ({error}): pip install torchvision, from the index that "
        "torch came from.",
        file=sys.stderr,
    )
    raise SystemExit(2) from None


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(max_epochs=3, seed=1, precision="bf16-mixed", log_every_n_steps=5)
    )
    folder: str = ""  # empty: four painted shapes, in runs/shapes
    model: str = "resnet50"  # or another of torchvision's ResNets
    size: int = 64  # pixels of a side, after cropping
    batch_size: int = 16  # of one rank
    learning_rate: float = 0.1  # at 256 samples a step; others in proportion
    warmup: float = 0.2  # share of all steps
    label_smoothing: float = 0.1
    weight_decay: float = 5e-5  # of weights; biases and BatchNorm have none
    compile: Literal["off", "before_ddp", "after_ddp"] = "off"
    workers: int = 0  # processes of each rank that read images


SHAPES = {"disc": (220, 40, 40), "ring": (230, 200, 40), "square": (40, 180, 60), "triangle": (40, 70, 220)}  # RGB


def paint_shapes(folder: Path, train: int = 64, val: int = 16) -> None:
    """So many images of each class, the same whenever they are painted: a shape anywhere on a dark background."""
    draft = Path(tempfile.mkdtemp(prefix="shapes-", dir=folder.parent))
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train), ("val", val)):
        for shape, colour in SHAPES.items():
            place = draft / split / shape
            place.mkdir(parents=True)
            for number in range(count):
                grey, x, y, side = torch.rand(4, generator=generator).tolist()
                image = Image.new("RGB", (64, 64), (int(80 * grey),) * 3)
                draw_shape(ImageDraw.Draw(image), shape, colour, 4 + 20 * x, 4 + 20 * y, 22 + 14 * side)
                image.save(place / f"{number:02}.png")
    try:
        draft.rename(folder)  # complete, or not there
    except OSError:  # another host, with the same disk, was there first
        shutil.rmtree(draft)


def draw_shape(draw: Any, shape: str, colour: tuple[int, int, int], x: float, y: float, side: float) -> None:
    box = (x, y, x + side, y + side)
    if shape == "disc":
        draw.ellipse(box, fill=colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=5)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y + side), (x + side / 2, y), (x + side, y + side)], fill=colour)


class Images(DataModule):
    """An ImageFolder each for training, with random crops and flips, and for validation."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = Path(options.folder or "runs/shapes")

    @property
    def classes(self) -> int:
        if not self.options.folder:  # not painted yet, perhaps
            return len(SHAPES)
        return sum(place.is_dir() for place in (self.folder / "train").iterdir())

    def prepare_data(self) -> None:
        if not self.options.folder and not self.folder.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            paint_shapes(self.folder)

    def setup(self, stage: str) -> None:
        size = self.options.size
        ready = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        ready += [v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])]  # ImageNet's
        crop = v2.RandomResizedCrop(size, scale=(0.6 if not self.options.folder else 0.08, 1.0), antialias=True)
        whole = [v2.Resize(size * 8 // 7 if self.options.folder else size, antialias=True), v2.CenterCrop(size)]
        self.train = datasets.ImageFolder(
            str(self.folder / "train"), v2.Compose([crop, v2.RandomHorizontalFlip(), *ready])
        )
        self.val = datasets.ImageFolder(str(self.folder / "val"), v2.Compose([*whole, *ready]))

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val, shuffle=False)

    def loader(self, dataset: Any, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset, self.options.batch_size, shuffle=shuffle, num_workers=self.options.workers,
            persistent_workers=self.options.workers > 0, pin_memory=torch.cuda.is_available(),
        )  # fmt: skip


class Classifier(Task):
    """A ResNet, channels last, with label smoothing; warm-up in a straight line, then down along half a cosine."""

    def __init__(
        self,
        model: str,
        classes: int,
        learning_rate: float,
        warmup: float = 0.2,
        label_smoothing: float = 0.1,
        weight_decay: float = 5e-5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Each block begins as the identity, so that the first steps reach all layers.
        self.net: Any = models.get_model(model, num_classes=classes, zero_init_residual=True)
        self.net.to(memory_format=torch.channels_last)
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        smoothing = self.hparams.label_smoothing
        loss = nn.functional.cross_entropy(self(images), targets, label_smoothing=smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        logits = self(images)
        self.accuracy(logits, targets)
        self.log("val/loss", nn.functional.cross_entropy(logits, targets))
        self.log("val/acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        weights = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        groups = [{"params": weights, "weight_decay": self.hparams.weight_decay}, {"params": others}]
        plan = self.trainer.plan
        assert plan is not None
        rate = self.hparams.learning_rate * (plan.global_batch or 256) / 256
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
        steps = self.trainer.estimated_stepping_batches
        warmup = max(1, round(steps * self.hparams.warmup))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    options = from_command_line(Options())
    # With 16 samples on a rank the statistics of one rank's batch would be noisy.
    strategy = DDPStrategy(sync_batchnorm=True, compile=options.compile)
    best = ModelCheckpoint(monitor="val/acc", mode="max")
    trainer = Trainer(options.trainer, strategy=strategy, callbacks=[best, LearningRateMonitor()])
    data = Images(options)
    task = Classifier(
        options.model,
        data.classes,
        options.learning_rate,
        options.warmup,
        options.label_smoothing,
        options.weight_decay,
    )
    trainer.fit(task, datamodule=data)
    if best.best_model_path:
        trainer.print(f"val/acc     {best.best_model_score:.4f}")
        trainer.print(f"checkpoint  {best.best_model_path}")


if __name__ == "__main__":
    main()
