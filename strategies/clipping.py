"""Gradient clipping by norm and by value, without a device sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm


def clip_gradients(parameters: Iterable[Tensor], limit: float, algorithm: str) -> Tensor | None:
    """Clip the gradients in place, and return their norm before clipping.

    `norm`: the L2 norm over all parameters together is brought to `limit` where it is larger; the
    norm is returned as a 0-dimensional tensor on the device. `value`: each element is brought into
    [-limit, limit]; None is returned.
    """
    if algorithm == "value":
        clip_grad_value_(parameters, limit)
        return None
    # A non-finite norm is left to be seen by the caller: raising here would need a device sync.
    norm: Tensor = clip_grad_norm_(parameters, limit, error_if_nonfinite=False)
    return norm


def are_finite(parameters: Iterable[Tensor]) -> Tensor:
    """Whether the norm of all gradients together is finite, as a 0-dimensional tensor on the device."""
    return get_total_norm([each.grad for each in parameters if each.grad is not None]).isfinite()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters the optimizer steps, over its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
