"""One process on one device."""

from __future__ import annotations

import torch

from .base import Strategy
from .environment import Environment
from .precision import Precision


class SingleDeviceStrategy(Strategy):
    """One process, no communication. Every method is the base class's trivial one."""

    def place(self, environment: Environment, device: torch.device, precision: Precision) -> None:
        """Refuse to run beside peers, of which this strategy would know nothing."""
        if environment.world_size > 1:
            raise ValueError(
                f"strategy='single_device' on {environment.world_size} processes: each would train on its own. "
                "Use strategy='ddp', or start one process."
            )
        super().place(environment, device, precision)
