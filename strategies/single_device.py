"""One process on one device."""

from __future__ import annotations

from typing import Literal

from .base import Strategy


class SingleDeviceStrategy(Strategy):
    """One process, no communication. Every method is the base class's trivial one.

    Args:
        fused_optimizer: as in `DDPStrategy`.
    """

    def __init__(self, *, fused_optimizer: bool | Literal["auto"] = "auto") -> None:
        self.fused_optimizer = fused_optimizer
