"""The check before wrapping: do all ranks hold the same model?

DistributedDataParallel itself finds some differences, but aborts the process (another dtype), hangs
(another buffer), or trains something else (another name) on others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# name, shape, dtype, stride, requires_grad
Signature = tuple[str, tuple[int, ...], str, tuple[int, ...], bool]


def signature(module: nn.Module) -> list[Signature]:
    """What must be equal on all ranks, parameter by parameter and buffer by buffer, in DDP's order."""

    def row(name: str, tensor: Tensor) -> Signature:
        return name, tuple(tensor.shape), str(tensor.dtype), tuple(tensor.stride()), tensor.requires_grad

    parameters = [row(name, tensor) for name, tensor in module.named_parameters()]
    return parameters + [row(f"{name} (buffer)", tensor) for name, tensor in module.named_buffers()]


def check_same_model(module: nn.Module, gather_objects: Callable[..., list[Any]]) -> None:
    """Compare the module's signature over the ranks.

    Raises:
        RuntimeError: on every rank, naming the first difference and the rank that has it.
    """
    mine = signature(module)
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather_objects(digest, name="model digest"))) == 1:
        return
    signatures: list[list[Signature]] = gather_objects(mine, name="model signatures")
    first = signatures[0]
    for rank, theirs in enumerate(signatures):
        for index in range(max(len(first), len(theirs))):
            here = _describe(first[index]) if index < len(first) else "nothing more"
            there = _describe(theirs[index]) if index < len(theirs) else "nothing more"
            if here != there:
                raise RuntimeError(
                    f"the ranks hold different models: at place {index}, rank {rank} has {there}, rank 0 has {here}. "
                    "Build the same model on every rank: nothing in its construction may depend on the rank, "
                    "on the local data, or on a file that only one host has."
                )


def _describe(row: Signature) -> str:
    name, shape, dtype, stride, requires_grad = row
    frozen = "" if requires_grad or "(buffer)" in name else ", frozen"
    return f"{name} {list(shape)} {dtype.removeprefix('torch.')} strides {list(stride)}{frozen}"


def check_same_parameters(module: nn.Module, all_gather: Callable[..., Tensor]) -> None:
    """Compare the bits of each parameter over the ranks, by their sum: one collective.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs, and the rank.
    """
    named = [
        (name, tensor.detach())
        for name, tensor in module.named_parameters()
        if tensor.numel() and not getattr(tensor, "_ddp_ignored", False)
    ]
    if not named:
        return
    every = all_gather(torch.stack([_sum_of_bits(tensor) for _, tensor in named]))
    differs = (every != every[0]).cpu()  # [ranks, parameters]
    if differs.any():
        rank, index = (int(number) for number in differs.nonzero()[0])
        raise RuntimeError(
            f"the ranks hold different weights: {named[index][0]} on rank {rank} is not that of rank 0. What begins "
            "equal and takes equal steps stays equal. Look for code that changes weights by random numbers or data, which differ "
            "from rank to rank (draw from a torch.Generator seeded equally, or change them on rank 0 and broadcast); for an "
            "optimizer or learning rate that depends on the rank; for a communication hook or strategy of your own that does "
            "not average; with init_sync=False, for models built differently."
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits as whole numbers of 64 bits, which wraps around: an int64 scalar.

    As a sum of floats it would depend on the order of the additions, which differs with the number of threads; and it
    takes no conversion, which would take longer than to write the tensor to a file.
    """
    memory = tensor.contiguous().view(-1).view(torch.uint8)
    if memory.data_ptr() % 8:
        memory = memory.clone()
    whole = memory.numel() // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum()
