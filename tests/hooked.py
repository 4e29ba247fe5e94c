"""Models in torch's DDP with a communication hook, and the gradients they should get, for tests of the hooks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from samestep.strategies import Environment
from samestep.strategies.comm_hooks import CommHook, HookContext, register
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64
# Smaller than a weight of the layers, so that each has a bucket of its own.
MANY_BUCKETS = 0.01


def layers(dtype: torch.dtype = torch.float64, count: int = 6) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(3)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*[module for pair in pairs for module in pair]).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64, size: int = 8) -> Tensor:
    """Every rank knows the batch of every other."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 0.5 * x).square().mean()


def local_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of one rank, without DDP."""
    return list(torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def prepare(hook: CommHook, model: nn.Module) -> CommHook:
    hook.setup(HookContext.create(model, Environment.read(), torch.device("cpu"), timedelta(seconds=30)))
    return hook


def in_ddp(model: nn.Module, hook: CommHook | None, **options: Any) -> DistributedDataParallel:
    """Wrapped, with the hook set up and registered. Keep it until after the backward: without it nothing is reduced."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": MANY_BUCKETS, **options})
    if hook is not None:
        register(ddp, prepare(hook, model))
        dist.barrier()  # a rank whose hook sends nothing must not leave while others still connect
    return ddp


def flat_gradients(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return torch.cat([gradient.detach().clone().reshape(-1) for gradient in gradients if gradient is not None])


def train(ddp: DistributedDataParallel, hook: CommHook | None, steps: range, lr: float = 0.3) -> None:
    """Plain SGD on the made-up batches."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, batch(dist.get_rank(), step)).backward()
        optimizer.step()
        if hook is not None:
            hook.after_step(ddp.parameters())
