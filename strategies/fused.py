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
        if scaled and is_fused(optimizer) and _has_momentum(optimizer):
            raise ValueError(
                f"precision='16-mixed' with a fused {type(optimizer).__name__}: {_MOMENTUM}. Build it with fused=False."
            )
        if wanted is False:
            continue
        reason = _why_not(optimizer, module)
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


# Seen in torch 2.13. A buffer is made without a value, which a skipped first step does not fill; and where a parameter gets
# its first gradient later than the others (unfrozen, or unused before), the kernel is given None.
_MOMENTUM = (
    "torch's fused SGD takes arbitrary memory for a momentum when its first step is skipped, and fails where a parameter's "
    "first gradient comes later than the others'"
)


def _has_momentum(optimizer: Optimizer) -> bool:
    return type(optimizer) is SGD and any(group["momentum"] for group in optimizer.param_groups)


def _why_not(optimizer: Optimizer, module: nn.Module) -> str:
    if type(optimizer) not in _KINDS:
        return f"expected one of {', '.join(kind.__name__ for kind in _KINDS)}"
    if _has_momentum(optimizer) and not is_fused(optimizer):
        return _MOMENTUM
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
