"""Fused optimizers: the whole update in one kernel, where torch has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# Exactly these classes: what a subclass does in its step is its own.
_KINDS = (SGD, Adam, AdamW, Adagrad)
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def choose_fused(
    optimizers: Sequence[Optimizer], module: nn.Module, wanted: bool | Literal["auto"], *, scaled: bool
) -> None:
    """Let optimizers that have not stepped yet use torch's fused kernels, which update all parameters in one pass.

    Several times faster than the loop over parameters, and than `foreach`. Results differ in the last bits (AdamW about
    3e-8 in float32), so the choice is kept in the checkpoint: a resumed run goes on as it began.

    Args:
        optimizers: those whose `foreach` or `fused` was chosen by hand keep that.
        module: holds the parameters.
        wanted: True: raise where it can't be done; "auto": leave such an optimizer as it is; False: do nothing.
        scaled: a GradScaler lets the optimizers skip steps.

    Raises:
        ValueError: it can't be, and is wanted; says why.
    """
    for optimizer in optimizers:
        bad_skips = _bad_skips(optimizer) if scaled else ""
        if bad_skips and is_fused(optimizer):
            raise ValueError(
                f"precision='16-mixed' with a fused {type(optimizer).__name__}: {bad_skips}. Build it with fused=False."
            )
        if wanted is False:
            continue
        reason = bad_skips or _why_not(optimizer, module)
        if reason and wanted is True:
            raise ValueError(
                f"fused_optimizer=True, but {type(optimizer).__name__} can't be fused: {reason}. Use "
                "fused_optimizer='auto', which leaves such an optimizer as it is."
            )
        if not reason:
            for group in optimizer.param_groups:
                group["fused"] = True
            optimizer.defaults["fused"] = True
        settle(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether all groups of the optimizer are fused."""
    return all(group.get("fused") for group in optimizer.param_groups)


def settle(optimizer: Optimizer) -> None:
    """Let the optimizer and a GradScaler know what its groups say; its constructor would have done this."""
    if type(optimizer) in _KINDS:
        fused = is_fused(optimizer)
        optimizer._step_supports_amp_scaling = fused  # pyright: ignore
        optimizer._need_device_dtype_check_for_fused = fused  # pyright: ignore


def _bad_skips(optimizer: Optimizer) -> str:
    # Seen in torch 2.13: the buffer is made without a value, and a skipped first step does not fill it.
    if type(optimizer) is SGD and any(group["momentum"] for group in optimizer.param_groups):
        return "torch's fused SGD goes on from a momentum of arbitrary memory when its first step is skipped"
    return ""


def _why_not(optimizer: Optimizer, module: nn.Module) -> str:
    if type(optimizer) not in _KINDS:
        return f"expected one of {', '.join(kind.__name__ for kind in _KINDS)}"
    if any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse for layer in module.modules()):
        return "an embedding has sparse gradients"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") is not None:
            return "fused or foreach was chosen by hand"
        if group.get("capturable") or group.get("differentiable"):
            return "it is capturable or differentiable"
        for parameter in cast("list[Tensor]", group["params"]):
            if parameter.device.type not in _DEVICES or (type(optimizer) is Adagrad and parameter.device.type != "cpu"):
                return f"there is no kernel for {parameter.device.type}"
            if parameter.dtype not in _TYPES or parameter.layout is not torch.strided:
                return f"there is no kernel for {parameter.dtype} and {parameter.layout}"
    return ""
