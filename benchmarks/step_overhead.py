"""Time an implementation's optimizer step against the raw loop's, in turns, in one process (or one on each rank).

    python benchmarks/step_overhead.py samestep --mode bare --model tiny
    torchrun --standalone --nproc-per-node=2 benchmarks/step_overhead.py samestep

Both train the same model on the same batches with the same optimizer, and take turns: a block of steps by the raw
loop, a block by the other. The other's batches come from `Turns`, which lets the raw loop run its block while the
other waits for its next batch, and keeps the time of each. See README.md for why. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LOG_INTERVAL = 50  # steps
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE, FEATURES, CLASSES = 16, 32, 10


@dataclass(frozen=True)
class Settings:
    """What is trained, and with what beside it."""

    mode: str
    """`bare`: nothing beside the training. `logging`: a progress bar, TensorBoard, the loss logged in each step and
    written in every 50th. `typical`: the same, and a checkpoint in every epoch."""
    model: str
    """`tiny`: two layers; `wide`: four of 1024; `deep`: 42 of 64; `sent`: twelve of 512, for slow networks;
    `large` (for memory.py): 14 of 2048."""
    steps: int
    """Steps of an epoch."""
    epochs: int
    """Epochs that are timed; one more goes before them."""
    block: int
    """Steps of a turn."""
    clock: str
    """`wall` or `cpu`, see `Moment`."""

    @property
    def logs(self) -> bool:
        """Whether there are a bar and TensorBoard."""
        return self.mode != "bare"

    @property
    def saves(self) -> bool:
        """Whether each epoch ends with a checkpoint."""
        return self.mode == "typical"


class Turns:
    """Ready batches for the other implementation, and a block of the raw loop before each block of them.

    Everything between two turns is the other's time: what it does at the end of an epoch, too.
    """

    def __init__(self, settings: Settings, rival: Iterator[None]) -> None:
        self.settings, self.items, self.rival = settings, make_batches(), rival
        self.epoch = -1
        self.blocks: list[Block] = []
        self.raw, self.began = Moment(), Moment()
        next(rival)  # builds everything, and pauses before its first block

    def __len__(self) -> int:
        return self.settings.steps

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        for step in range(self.settings.steps):
            if step % self.settings.block == 0:
                self.turn(step)
            yield self.items[step % len(self.items)]

    def turn(self, step: int) -> None:
        """End the other's block, which came before `step`, and let the raw loop run the next one."""
        other = Moment.now() - self.began
        # The first epoch warms up, and its end is not kept either.
        if self.epoch > 1 or (self.epoch == 1 and step):
            place = {0: "log", self.settings.block: "behind log"}.get(step % LOG_INTERVAL, "ordinary")
            # What ends an epoch waits for the disk and for other ranks.
            clock = self.settings.clock if step else "wall"
            raw_time, other_time = getattr(self.raw, clock), getattr(other, clock)
            self.blocks.append(Block(self.epoch - (step == 0), place if step else "end", raw_time, other_time))
        if RANKS > 1:
            dist.barrier()
        began = Moment.now()
        next(self.rival)
        self.raw = Moment.now() - began
        if RANKS > 1:
            dist.barrier()
        self.began = Moment.now()


class Moment(NamedTuple):
    """Two clocks, in seconds."""

    wall: float = 0.0
    cpu: float = 0.0
    """Of the main thread, which computes everything: without what it waits, also for the other processes here."""

    @staticmethod
    def now() -> Moment:
        """What the clocks say."""
        return Moment(time.perf_counter(), time.thread_time())

    def __sub__(self, earlier: Moment) -> Moment:
        return Moment(self.wall - earlier.wall, self.cpu - earlier.cpu)


class Block(NamedTuple):
    """One block of the raw loop, and the same one of the other, right after it."""

    epoch: int
    kind: str
    """`end`: the end of an epoch is in it; `log`: the loss is written in its last step, where it is; `behind log`:
    the other's TensorBoard thread may still be writing, as the raw loop's may in the block before; else `ordinary`."""
    raw: float
    other: float


Batch = tuple[Tensor, Tensor]
Run = Callable[[Settings, Path, Iterable[Batch]], None]


# --- what all of them train ----------------------------------------------------------------


def build_model(kind: str) -> nn.Module:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    width, depth = {"tiny": (64, 0), "wide": (1024, 2), "deep": (64, 40), "sent": (512, 10), "large": (2048, 12)}[kind]
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_batches() -> list[Batch]:
    """Ready batches, so that no loading hides what a step costs."""
    generator = torch.Generator().manual_seed(RANK)
    return [
        (
            torch.randn(BATCH_SIZE, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(50)
    ]


# --- the implementations -------------------------------------------------------------------


def raw_blocks(settings: Settings, folder: Path, batches: Iterable[Batch], epochs: int) -> Iterator[None]:
    """The loop a user writes by hand, as a generator that pauses before each block."""
    model = build_model(settings.model)
    net = nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model
    optimizer, step = build_optimizer(model), 0
    writer: Any = None
    if settings.logs:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        writer = SummaryWriter(folder / "tensorboard") if RANK == 0 else None
    for epoch in range(epochs):
        bar: Any = tqdm(batches, disable=RANK != 0, dynamic_ncols=True) if settings.logs else batches  # pyright: ignore
        for x, y in bar:
            if step % settings.block == 0:
                yield
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if settings.logs and step % LOG_INTERVAL == 0:
                value = loss.detach()
                if RANKS > 1:
                    dist.all_reduce(value, dist.ReduceOp.AVG)
                value = value.item()
                bar.set_postfix(loss=value, refresh=False)
                if writer is not None:
                    writer.add_scalar("train/loss", value, step)
        if settings.saves and RANK == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
            torch.save(state, folder / "partial.pt")
            os.replace(folder / "partial.pt", folder / "checkpoint.pt")
    if writer is not None:
        writer.close()


def raw(settings: Settings, folder: Path, batches: Iterable[Batch]) -> None:
    """The raw loop as the other implementation: the ratio must come out as 1."""
    for _ in raw_blocks(settings, folder, batches, 1 + settings.epochs):
        pass


def samestep(settings: Settings, folder: Path, batches: Iterable[Batch]) -> None:
    """This project."""
    from samestep.trainer import Task, Trainer

    logs = settings.logs

    class Classifier(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model(settings.model)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if logs:
                self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1 + settings.epochs,
        log_every_n_steps=LOG_INTERVAL,
        logger=logs,
        enable_progress_bar=logs,
        enable_checkpointing=settings.saves,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Classifier(), batches)


def lightning(settings: Settings, folder: Path, batches: Iterable[Batch]) -> None:
    """Lightning; bare is `barebones=True`."""
    import lightning as L

    logs = settings.logs

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model(settings.model)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if logs:
                self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self)

    options: dict[str, Any] = {"barebones": True}
    if settings.logs:
        options = {"enable_checkpointing": settings.saves, "log_every_n_steps": LOG_INTERVAL}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=1 + settings.epochs,
        use_distributed_sampler=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )
    trainer.fit(Classifier(), batches)


def accelerate(settings: Settings, folder: Path, batches: Iterable[Batch]) -> None:
    """The raw loop with Accelerate's objects in it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard" if settings.logs else None, project_dir=str(folder))
    if settings.logs:
        from tqdm import tqdm

        accelerator.init_trackers("tensorboard")
    plain = build_model(settings.model)
    model, optimizer = accelerator.prepare(plain, build_optimizer(plain))
    step = 0
    for _ in range(1 + settings.epochs):
        bar: Any = tqdm(batches, disable=RANK != 0, dynamic_ncols=True) if settings.logs else batches  # pyright: ignore
        for x, y in bar:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if settings.logs and step % LOG_INTERVAL == 0:
                value = accelerator.reduce(loss.detach(), "mean").item()
                bar.set_postfix(loss=value, refresh=False)
                accelerator.log({"train/loss": value}, step=step)
        if settings.saves:
            accelerator.save_state(str(folder / "checkpoint"))
    for tracker in accelerator.trackers:
        tracker.finish()  # end_training would end the process group, too


IMPLEMENTATIONS: dict[str, Run] = {
    "raw": raw,
    "samestep": samestep,
    "lightning": lightning,
    "accelerate": accelerate,
}


# --- taking turns --------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Swallows what progress bars draw, as a terminal would."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


class Batches:
    """Ready batches for the raw loop, as many as an epoch has."""

    def __init__(self, steps: int) -> None:
        self.steps, self.items = steps, make_batches()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            yield self.items[step % len(self.items)]


def take_turns(run: Run, settings: Settings) -> list[Block]:
    """Train once with both, and return the timed blocks."""
    shared = [tempfile.mkdtemp(prefix="step-overhead-") if RANK == 0 else ""]
    if RANKS > 1:
        dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    (folder / "raw").mkdir(exist_ok=True)
    (folder / "other").mkdir(exist_ok=True)
    rival = raw_blocks(settings, folder / "raw", Batches(settings.steps), 2 + settings.epochs)
    turns = Turns(settings, rival)
    try:
        run(settings, folder / "other", turns)
    finally:
        rival.close()
        if RANKS > 1:
            dist.barrier()
        if RANK == 0:
            shutil.rmtree(folder)
    return turns.blocks


def summary(blocks: list[Block], settings: Settings) -> dict[str, float]:
    """Microseconds of a step, and ratios to the raw loop: of a step, and of an epoch with what ends it.

    Of the blocks of one kind in one epoch the lower quartile counts, for either side: so few interruptions stay out,
    and many do no harm where they hit both. The ratio is taken epoch by epoch, since a machine may be slow for
    seconds; their median is the result.
    """
    ends = [block for block in blocks if block.kind == "end"]
    raw_end, other_end = (statistics.median(getattr(block, side) for block in ends) for side in ("raw", "other"))
    raw_step: list[float] = []
    step_ratios: list[float] = []
    epoch_ratios: list[float] = []
    for epoch in sorted({block.epoch for block in ends}):
        inside = [block for block in blocks if block.epoch == epoch and block.kind != "end"]
        raw_inside, other_inside = (
            sum(
                len(times) * statistics.quantiles(times)[0]
                for kind in ("ordinary", "log", "behind log")
                if len(times := [getattr(block, side) for block in inside if block.kind == kind]) > 1
            )
            for side in ("raw", "other")
        )
        raw_step.append(raw_inside / (len(inside) * settings.block))
        step_ratios.append(other_inside / raw_inside)
        epoch_ratios.append((other_inside + other_end) / (raw_inside + raw_end))
    raw_us, step = 1e6 * statistics.median(raw_step), statistics.median(step_ratios)
    block_ms = 1e-3 * raw_us * settings.block
    return {
        "raw_us": raw_us,
        "other_us": raw_us * step,
        "step_ratio": step,
        "epoch_ratio": statistics.median(epoch_ratios),
        "raw_end_ms": 1e3 * raw_end - block_ms,
        "other_end_ms": 1e3 * other_end - block_ms * step,
    }


def main() -> None:
    """Time, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("implementation", choices=list(IMPLEMENTATIONS))
    add_options(parser)
    parser.add_argument("--blocks", action="store_true", help="print the time of every block, too")
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    if settings.steps % LOG_INTERVAL or LOG_INTERVAL % settings.block:
        parser.error(f"--steps {settings.steps}: expected a multiple of {LOG_INTERVAL}, and --block a divisor of it")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if RANKS > 1:
        dist.init_process_group("gloo")
    output, sys.stdout, sys.stderr = sys.stdout, Terminal(), Terminal()
    try:
        blocks = take_turns(IMPLEMENTATIONS[arguments.implementation], settings)
    finally:
        sys.stdout, sys.stderr = output, sys.__stderr__
    if RANK == 0:
        line: dict[str, Any] = {"implementation": arguments.implementation, "ranks": RANKS, **summary(blocks, settings)}
        if arguments.blocks:
            line["blocks"] = blocks
        print(json.dumps(line), flush=True)
    if RANKS > 1:
        dist.destroy_process_group()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What this and compare.py take."""
    parser.add_argument("--mode", choices=["bare", "logging", "typical"], default="bare")
    parser.add_argument("--model", choices=["tiny", "wide", "deep", "sent"], default="tiny")
    parser.add_argument("--steps", type=int, default=500, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=10, help="timed epochs")
    parser.add_argument("--block", type=int, default=5, help="steps of a turn")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: the time of the main thread, for machines that are busy with other things",
    )


if __name__ == "__main__":
    main()
