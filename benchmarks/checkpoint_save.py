"""How long a checkpoint in the background keeps training waiting, beside a plain `torch.save` of the same state.

    python benchmarks/checkpoint_save.py
    torchrun --standalone --nproc-per-node=2 benchmarks/checkpoint_save.py --megabytes 10

One process (or one on each rank) trains a model whose weights and AdamW state have a given size. In turns it saves a
checkpoint in the background, trains beside the writer until the checkpoint is on the disk, trains on its own, and
calls torch.save for the same state, with and without fsync. Rank 0 prints medians, and the ratios:

blocked   from the end of the step until training goes on: the ranks' agreement, the snapshot, the word to the thread
copy      of the state's tensors into memory that is there already: what no snapshot can be quicker than
beside    a step while the thread writes; quiet: a step on its own
CPU       time that the main thread computed, without what it waited for: what can be trusted on a busy machine

With `--budget 0.15` the exit status is 1 where `blocked` over torch.save (without fsync) is above it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.trainer import Task, Trainer
from torch import nn
from torch.utils.data import DataLoader

QUIET_STEPS = 5


class Sized(Task):
    """Linear layers whose weights, with AdamW's two moments, have `megabytes` in all."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        width = 512 if megabytes < 100 else 2048
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.example_input_array = torch.ones(1, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(self.example_input_array).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Turns(Callback):
    """Takes the turns after each step, and keeps the time of everything."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.times: dict[str, list[float]] = defaultdict(list)
        self.keep = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=10**9)
        self.quiet = 0
        self.saved: str | None = None
        self.memory: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        self.beside = trainer.checkpoint_writer.is_writing
        self.began = time.perf_counter()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        took = time.perf_counter() - self.began
        if trainer.global_step < 3:
            return
        if self.saved is not None and self.keep.last_path == self.saved:
            if self.beside and trainer.checkpoint_writer.is_writing:
                self.times["beside"].append(took)
            return
        if self.saved is not None:
            self.saved = None
            trainer.wait_for_checkpoint()
        self.quiet += 1
        if self.quiet > 1:
            self.times["quiet"].append(took)
        if self.quiet <= QUIET_STEPS:
            return
        self.quiet = 0
        if trainer.is_global_zero:
            state = {"model": task.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            for name in ("torch.save", "torch.save, fsync"):
                computed = time.thread_time()
                self.times[name].append(plain_save(state, self.folder / "plain.pt", sync="fsync" in name))
                self.times[f"{name}, CPU"].append(time.thread_time() - computed)
            self.copy(state)
        trainer.strategy.barrier()
        self.saved = self.keep.last_path
        began, computed = time.perf_counter(), time.thread_time()
        self.keep._save(trainer)  # as it does when a step is due
        self.times["blocked"].append(time.perf_counter() - began)
        self.times["blocked, CPU"].append(time.thread_time() - computed)
        if len(self.times["blocked"]) > self.rounds:
            trainer.stop("measured")

    def copy(self, state: dict[str, Any]) -> None:
        """The tensors of a state, one by one."""
        moments = state["optimizer"]["state"].values()
        tensors = [*state["model"].values(), *(value for values in moments for value in values.values())]
        self.memory = self.memory or [tensor.clone() for tensor in tensors]
        began, computed = time.perf_counter(), time.thread_time()
        for memory, tensor in zip(self.memory, tensors, strict=True):
            memory.copy_(tensor)
        self.times["copy"].append(time.perf_counter() - began)
        self.times["copy, CPU"].append(time.thread_time() - computed)


def plain_save(state: dict[str, Any], file: Path, *, sync: bool) -> float:
    """Seconds of a torch.save into a new file."""
    began = time.perf_counter()
    with open(file, "wb") as target:
        torch.save(state, target)
        if sync:
            target.flush()
            os.fsync(target.fileno())
    took = time.perf_counter() - began
    file.unlink()
    return took


def measure(megabytes: float, rounds: int) -> float:
    """Train, print, and return blocked over torch.save."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=os.environ.get("BENCHMARK_DIR")))
    turns = Turns(folder, rounds)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[turns, turns.keep],
    )  # fmt: skip
    task = Sized(megabytes)
    try:
        trainer.fit(task, DataLoader(torch.ones(10**6), 1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not trainer.is_global_zero:
        return 0.0
    first = turns.times["blocked"].pop(0), turns.times["blocked, CPU"].pop(0)  # its memory is new
    median = {name: statistics.median(values) for name, values in turns.times.items()}
    size = 3 * sum(p.numel() * p.element_size() for p in task.parameters()) / 1e6
    print(f"{size:.0f} MB of state, {trainer.world_size} rank(s), {rounds} rounds; milliseconds, median:")
    median["blocked, first"], median["blocked, first, CPU"] = first
    for name in ("torch.save", "torch.save, fsync", "copy", "blocked", "blocked, first"):
        print(f"  {name:18} {1000 * median[name]:9.1f}   CPU {1000 * median[f'{name}, CPU']:9.1f}")
    print(f"  {'step, quiet':18} {1000 * median['quiet']:9.1f}   beside {1000 * median['beside']:9.1f}")
    for what in ("blocked", "copy"):
        ratios = [
            median[f"{what}{of}"] / median[f"torch.save{sync}{of}"] for of in ("", ", CPU") for sync in ("", ", fsync")
        ]
        print(
            "  {:7} ÷ torch.save {:.3f}, with fsync {:.3f}; CPU {:.3f}, with fsync {:.3f}".format(what, *ratios),
            flush=True,
        )
    return median["blocked"] / median["torch.save"]


def main() -> int:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 500])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, help="the greatest ratio of blocked to torch.save")
    arguments = parser.parse_args()
    ratios = [measure(megabytes, arguments.rounds) for megabytes in arguments.megabytes]
    return int(arguments.budget is not None and max(ratios) > arguments.budget)


if __name__ == "__main__":
    sys.exit(main())
