"""Backwards in manual optimization: those that are not ours leave each rank its own gradients, without an error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class OurBackwards:
    """Tells the strategy's own backwards from others."""

    running = False
    """Whether one of ours is running; set around it."""

    @contextmanager
    def required(self, module: nn.Module) -> Generator[None]:
        """Raise, out of the backward itself, where a gradient comes from another. Costs a call for each parameter."""

        def check(_: Tensor) -> None:
            if not self.running:
                raise RuntimeError(
                    "loss.backward() in manual optimization leaves each rank its own gradients: expected "
                    "self.manual_backward(loss), which averages them over the ranks."
                )

        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        handles: list[Any] = [parameter.register_post_accumulate_grad_hook(check) for parameter in trainable]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
