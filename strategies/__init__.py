"""How the processes of a run cooperate."""

from .base import Pending, Strategy
from .ddp import DDPStrategy
from .environment import Environment
from .precision import Precision
from .single_device import SingleDeviceStrategy

__all__ = ["DDPStrategy", "Environment", "Pending", "Precision", "SingleDeviceStrategy", "Strategy"]
