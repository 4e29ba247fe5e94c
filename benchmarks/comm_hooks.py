"""What a training step costs with each communication hook, where the network is the bottleneck.

    torchrun --standalone --nproc-per-node=2 benchmarks/comm_hooks.py
    torchrun --nnodes=2 --nproc-per-node=1 … benchmarks/comm_hooks.py        # on two hosts: what hooks are for

The model is 12 × Linear(512, 512) + ReLU (12.6 MB of float32 gradients), on 256 samples a rank. All variants take turns
in the same processes, a few steps each, so that a slow minute of the machine is everyone's. Printed are the median
milliseconds of a step, its ratio to raw DDP with the same buckets, the megabytes each rank sends, and the error of the
gradients relative to the exact mean in the last step (over all parameters, in the L2 norm). The error of `powersgd` is
made up for in later steps; that of local SGD is by design.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from samestep.strategies import Environment
from samestep.strategies.comm_hooks import (
    FP16,
    CommHook,
    Hierarchical,
    HookContext,
    Int8,
    PostLocalSGD,
    PowerSGD,
    register,
    resolve,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

MIB = 1.0  # of a bucket
VARIANTS: dict[str, tuple[float | None, Callable[[], CommHook | None]]] = {
    "raw DDP": (MIB, lambda: None),
    "raw DDP, default buckets": (None, lambda: None),
    "torch's fp16_compress_hook": (MIB, lambda: resolve(fp16_compress_hook)),
    "fp16": (MIB, lambda: resolve("fp16")),
    "bf16": (MIB, lambda: resolve("bf16")),
    "quantize8": (MIB, lambda: resolve("quantize8")),
    "powersgd, rank 4": (MIB, lambda: PowerSGD(rank=4, start_step=1)),
    "powersgd, rank 4, FP16 wire": (MIB, lambda: PowerSGD(rank=4, start_step=1, wire=FP16())),
    "hierarchical, Int8 between": (MIB, lambda: Hierarchical(Int8())),
    "post_local_sgd, period 8": (MIB, lambda: PostLocalSGD(0, 8)),
}


class Variant:
    """A model in DDP with one of the hooks, which trains on its own."""

    def __init__(self, cap: float | None, hook: CommHook | None, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        pairs = [(nn.Linear(arguments.width, arguments.width), nn.ReLU()) for _ in range(arguments.layers)]
        self.model = nn.Sequential(*[module for pair in pairs for module in pair])
        self.hook = hook
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        if hook is not None:
            environment, timeout = Environment.read(), timedelta(minutes=2)
            hook.setup(HookContext.create(self.model, environment, torch.device("cpu"), timeout))
            register(self.ddp, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.milliseconds: list[float] = []
        self.sent: list[float] = []

    def loss(self, x: Tensor, model: nn.Module) -> Tensor:
        return (model(x) - x).square().mean()

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, self.ddp).backward()
        self.optimizer.step()
        if self.hook is not None:
            self.hook.after_step(self.model.parameters())

    def run(self, x: Tensor, steps: int) -> None:
        """Take the steps, and note the milliseconds and the megabytes of one."""
        dist.barrier()
        bytes_before, before = sent_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step(x)
        dist.barrier()
        self.milliseconds.append(1000 * (time.perf_counter() - before) / steps)
        self.sent.append((sent_bytes() - bytes_before) / steps / 1e6)

    def error(self, x: Tensor) -> float:
        """Of the gradients, relative to the exact mean: one more backward."""
        own = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(self.loss(x, self.model), list(self.model.parameters()))]
        )
        dist.all_reduce(own.div_(dist.get_world_size()))
        self.optimizer.zero_grad()
        self.loss(x, self.ddp).backward()
        found = torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])
        return ((found - own).norm() / own.norm()).item()


def sent_bytes() -> float:
    """What this rank has sent over gloo's interface so far; over the loopback, a mean of the ranks."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    total = int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    return total / (dist.get_world_size() if interface == "lo" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn (8 hold one average of post_local_sgd)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--only", default="", help="variants whose name contains one of these, comma separated")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(arguments.batch_size, arguments.width)
    names = [
        name
        for name in VARIANTS
        if name.startswith("raw") or any(part in name for part in arguments.only.split(","))  # "" is in every name
    ]
    variants = {name: Variant(VARIANTS[name][0], VARIANTS[name][1](), arguments) for name in names}
    for turn in range(arguments.rounds + 1):
        for variant in variants.values():
            variant.run(x, arguments.steps)
            if turn == 0:  # buckets are laid out anew, and connections made
                variant.milliseconds.clear()
                variant.sent.clear()
    if rank == 0:
        print(f"| {dist.get_world_size()} ranks | ms per step [least, greatest] | ÷ raw | MB sent | error |")
        print("|---|---:|---:|---:|---:|", flush=True)
    raw = statistics.median(variants["raw DDP"].milliseconds)
    for name, variant in variants.items():
        error = variant.error(x)
        times = variant.milliseconds
        middle = statistics.median(times)
        if rank == 0:
            spread = f"{middle:.0f} [{min(times):.0f}, {max(times):.0f}]"
            print(f"| {name} | {spread} | {middle / raw:.2f} | {statistics.median(variant.sent):.2f} | {error:.1e} |")
    dist.barrier()
    for variant in variants.values():
        if variant.hook is not None:
            variant.hook.teardown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
