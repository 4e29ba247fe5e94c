"""A character-level GPT that learns to write Python, from the sources of Python's standard library.

    python examples/char_gpt.py                                                 one CPU process, or all GPUs
    torchrun --standalone --nproc-per-node=2 examples/char_gpt.py               two ranks
    python examples/char_gpt.py trainer.default_root_dir=runs/gpt               goes on where it was ended, if it was
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 examples/char_gpt.py \\
        layers=12 width=768 heads=12 context=1024 train_pieces=100000 learning_rate=6e-4 compile=before_ddp \\
        trainer.precision=bf16-mixed trainer.max_epochs=10

What it trains on are pieces of unequal length, padded. Each character counts once: in the loss, whatever micro-batch and
rank it is in, and in the bits per character of the validation.
Options are `name=value`; those of `Options` below, and `trainer.<option>` for everything in `TrainerConfig`.
"""

from __future__ import annotations

import math
import re
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from samestep.callbacks import LearningRateMonitor, ModelCheckpoint
from samestep.strategies import DDPStrategy
from samestep.trainer import DataModule, Task, Trainer, TrainerConfig, from_command_line, warmup_schedule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CHARACTERS = 128  # ASCII; 0 is where a text begins
NO_TARGET = -1


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            max_epochs=1, seed=1, accumulate_grad_batches=2, gradient_clip_val=1.0, log_every_n_steps=10
        )
    )
    layers: int = 2
    width: int = 96
    heads: int = 4
    context: int = 128  # characters of a piece at most
    train_pieces: int = 4096
    val_pieces: int = 256
    batch_size: int = 4  # pieces in a micro-batch of one rank
    learning_rate: float = 4e-3
    warmup: float = 0.1  # share of all steps
    compile: Literal["off", "before_ddp", "after_ddp"] = "off"
    ckpt_path: str | None = "auto"  # go on in trainer.default_root_dir, if a checkpoint is there
    save_every: int = 50  # steps


class PythonSources(DataModule):
    """Paragraphs of the standard library's modules, cut where they are longer than the context."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def setup(self, stage: str) -> None:
        needed = self.options.train_pieces + self.options.val_pieces
        pieces: list[bytes] = []
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            source = path.read_text("utf-8", errors="replace").encode("ascii", errors="replace")
            for paragraph in re.findall(rb".+?(?:\n\n+|\Z)", source, re.DOTALL):
                pieces += [
                    paragraph[i : i + self.options.context] for i in range(0, len(paragraph), self.options.context)
                ]
            if len(pieces) >= needed:
                break
        chosen = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:needed].tolist()
        held_out = self.options.val_pieces
        self.train = self.padded([pieces[index] for index in chosen[held_out:]])
        self.val = self.padded([pieces[index] for index in chosen[:held_out]])

    @property
    def unigram_bits(self) -> float:
        """Bits per character by the frequencies of the characters alone: what any model should be below."""
        targets = self.val.tensors[1]
        counts = targets[targets != NO_TARGET].bincount().double()
        return torch.distributions.Categorical(counts).entropy().item() / math.log(2)

    def padded(self, pieces: list[bytes]) -> TensorDataset:
        """Inputs and targets, each [pieces, context]: every character is to be told from those before it."""
        inputs = torch.zeros(len(pieces), self.options.context, dtype=torch.long)
        targets = torch.full_like(inputs, NO_TARGET)
        for row, piece in enumerate(pieces):
            targets[row, : len(piece)] = torch.tensor(list(piece))
            inputs[row, 1 : len(piece)] = targets[row, : len(piece) - 1]
        return TensorDataset(inputs, targets)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.options.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 64)


class Block(nn.Module):
    """Attention to what came before, then two layers at each place; both are added to what they read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # [batch, heads, time, width / heads]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(Task):
    """A GPT, as in Radford et al. 2019: normalized before each layer, with one matrix for what goes in and comes out."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, learning_rate: float = 4e-3, warmup: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:  # [batch, time] -> [batch, time, CHARACTERS]
        x = self.characters(inputs) + self.places.weight[: inputs.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.characters.weight)

    def loss_and_count(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The sum over all characters of -ln p, and how many they are."""
        inputs, targets = batch
        logits = self(inputs).flatten(0, 1)
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        return loss, (targets != NO_TARGET).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = self.loss_and_count(batch)
        self.log("train/bits", loss / count / math.log(2), prog_bar=True)
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, count = self.loss_and_count(batch)
        self.log("val/bits", loss / count / math.log(2), prog_bar=True, batch_size=int(count))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.learning_rate, betas=(0.9, 0.95))
        steps = self.trainer.estimated_stepping_batches
        schedule = warmup_schedule(optimizer, self.hparams.warmup, steps, final_ratio=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def write(self, pieces: int) -> list[str]:
        """Pieces of text, character by character, each up to its first empty line."""
        generator = torch.Generator().manual_seed(0)
        texts = torch.zeros(pieces, 1, dtype=torch.long, device=self.device)
        for _ in range(self.hparams.context):
            chances = self(texts)[:, -1].float().softmax(-1).cpu()
            texts = torch.cat([texts, torch.multinomial(chances, 1, generator=generator).to(texts)], 1)
        written = [bytes(text).decode("ascii").partition("\n\n")[0] for text in texts[:, 1:].tolist()]
        return [re.sub(r"[^\n -~]", "?", text) for text in written]  # a terminal would obey control characters


def main() -> None:
    options = from_command_line(Options())
    checkpoint = ModelCheckpoint(every_n_train_steps=options.save_every)
    trainer = Trainer(
        options.trainer,
        strategy=DDPStrategy(compile=options.compile),
        callbacks=[checkpoint, LearningRateMonitor()],
    )
    task = CharGPT(options.layers, options.width, options.heads, options.context, options.learning_rate, options.warmup)
    data = PythonSources(options)
    trainer.fit(task, datamodule=data, ckpt_path=options.ckpt_path)

    # From here on the program runs on every rank.
    result = trainer.validate(task, datamodule=data, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"val/bits  {result['val/bits']:.9f} per character; {data.unigram_bits:.3f} by their frequencies alone")
        print("\n\n".join(["what it writes:", *task.write(3)]))


if __name__ == "__main__":
    main()
