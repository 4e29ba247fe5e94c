"""Losses that are sums with a weight each: the gradient of a step is that of Σ loss / Σ weight, over all that is in it.

A mean over tokens, say, where micro-batches and ranks hold different numbers of them: the mean of means would count a
token in a short sentence for more. The weights' sum over the ranks is known after the last backward only, so the
gradients are brought to it then, by one small reduction and one pass over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor

from ..strategies.base import Strategy

_ESTIMATES = 1e-30, 1e30
"""A loss divided by more or less would leave the range of float32."""


def check_weight_name(task: object, output: Any) -> None:
    """Refuse a key beside the loss that is all but "weight": without it, the loss would be taken for a mean.

    Raises:
        ValueError: names it.
    """
    keys = (
        [key for key in cast("Mapping[Any, Any]", output) if isinstance(key, str)]
        if isinstance(output, Mapping)
        else []
    )
    if "weight" not in keys and (near := get_close_matches("weight", keys, 1, 0.9)):
        raise ValueError(
            f"{type(task).__name__}.training_step returns {near[0]!r} beside the loss: expected 'weight', if it is what the loss "
            "is a sum over, or a name that can't be taken for it."
        )


class WeightedLoss:
    """Divides losses beforehand by what the weights will be, about, and corrects the gradients by what they were.

    The estimate is the sum of the step before, so that scaled losses stay in the range of float16.

    A weight that is NaN, infinite, or a tensor below zero makes the step's gradients NaN, as such a loss would: it is seen,
    and asking for it would make each step wait for the device.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._sum = torch.zeros((), dtype=torch.float64, device=strategy.device)
        self._estimate = torch.ones_like(self._sum)

    def state_dict(self) -> dict[str, Any]:
        """The estimate, which all ranks share: with another one the gradients would be rounded otherwise."""
        return {"estimate": self._estimate.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._estimate = state["estimate"].to(self._estimate.device)

    def divide(self, loss: Tensor, weight: Any) -> Tensor:
        """The loss for the backward of a micro-batch; its weight is added up.

        Raises:
            TypeError: the weight is no number and no scalar tensor.
            ValueError: it is a number below zero.
        """
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise TypeError(f"the loss's weight has shape {list(weight.shape)}: expected a scalar. Take its sum.")
            weight = weight.detach().reshape(())
            weight = torch.where(weight < 0, math.nan, weight)
        elif not isinstance(weight, (int, float)):
            raise TypeError(f"the loss's weight is a {type(weight).__name__}: expected a number or a scalar tensor.")
        elif weight < 0:
            raise ValueError(f"the loss's weight is {weight}: expected what the loss is a sum over, zero or more.")
        self._sum += weight
        return loss / self._estimate.to(loss.dtype)

    def forget(self) -> None:
        """Drop the weights of a step that will not be taken."""
        self._sum = torch.zeros_like(self._sum)

    def correct(self, parameters: Iterable[Tensor]) -> None:
        """Bring the gradients, averaged over the ranks, to the sum of the weights of all micro-batches and ranks."""
        ranks = self._strategy.world_size
        total = self._strategy.all_reduce(self._sum, name="weights of the step", each_step=True)
        factor = self._estimate * ranks / total
        factor = torch.where(total.isfinite(), torch.where(total == 0, 0.0, factor), math.nan)
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for several in gradients.values():
            torch._foreach_mul_(several, factor)  # pyright: ignore[reportPrivateUsage]
        usable = (total > 0) & total.isfinite()
        self._estimate = torch.where(usable, (total / ranks).clamp(*_ESTIMATES), self._estimate)
        self.forget()


def agreed(strategy: Strategy, weighted: bool | None) -> bool | None:
    """Whether the losses of a step are weighted, on all ranks alike; None: no rank had a loss.

    Args:
        strategy: asks the ranks.
        weighted: of this rank; None: it had no loss in this step.

    Raises:
        RuntimeError: on every rank, where they differ.
    """
    kinds = strategy.gather_objects(weighted, name="weighted losses")
    known = {kind for kind in kinds if kind is not None}
    if len(known) > 1:
        each = ", ".join(
            f"rank {rank}: {'yes' if kind else 'no'}" for rank, kind in enumerate(kinds) if kind is not None
        )
        raise RuntimeError(
            f'training_step returns a loss with a "weight" on some ranks only ({each}): expected it on all, or on none.'
        )
    return known.pop() if known else None
