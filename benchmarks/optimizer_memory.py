"""Peak memory of DDP's optimizer step: raw DDP, the plain step, and the optimizer in backward.

    python benchmarks/optimizer_memory.py

Each variant trains 16 × Linear(1024, 1024) (64 MiB of float32 parameters) for a few steps on two ranks, in processes of
its own. Printed is the peak of resident memory above that before the model was built, of rank 0, in multiples of the
parameters' size: parameters, gradients and AdamW's two moments are 4, DDP's buckets 1 more without views.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from samestep.strategies import DDPStrategy
from samestep.trainer import Task, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "plain, foreach": {"fused_optimizer": False},
    "plain, fused": {"fused_optimizer": True},
    "in backward, foreach": {"fused_optimizer": False, "optimizer_in_backward": True},
    "in backward, fused": {"fused_optimizer": True, "optimizer_in_backward": True},
}


class Wide(Task):
    """The model; AdamW by torch's foreach kernels unless the strategy fuses it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        self.fused = fused

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=None if self.fused else True)


class Batches:
    """Ready batches of 8 rows."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(8, 1024) for _ in range(STEPS))


def resident() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(variant: str) -> None:
    """Train in this process; rank 0 prints the peak."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm = nn.Linear(2, 2)
    warm(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(warm.parameters(), foreach=True).step()
    before = resident()
    if variant == "raw":
        task = Wide(fused=False)
        model, optimizer = DistributedDataParallel(task.net, bucket_cap_mb=4), task.configure_optimizers()
        for batch in Batches():
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    else:
        task = Wide(fused="fused" in variant)
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", strategy=DDPStrategy(bucket_cap_mb=4, **VARIANTS[variant]), **quiet
        )
        trainer.fit(task, Batches())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    size = sum(parameter.numel() * 4 for parameter in task.parameters())
    if dist.get_rank() == 0:
        print(json.dumps({"peak": peak / size}), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", help=argparse.SUPPRESS)  # what the processes started here are called with
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    for variant in ("raw", *VARIANTS):
        peaks: list[float] = []
        for _ in range(arguments.rounds):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*launcher, f"--train={variant}"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            peaks.append(json.loads(done.stdout.splitlines()[-1])["peak"])
        print(
            f"{variant:22} {sorted(peaks)[len(peaks) // 2]:.2f} × the parameters [{min(peaks):.2f}, {max(peaks):.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
