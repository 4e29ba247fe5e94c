"""How the processes of a run cooperate."""

from .activation_checkpointing import checkpoint_activations
from .base import Pending, Strategy
from .ddp import DDPStrategy
from .environment import Environment
from .launch_function import launch_function
from .precision import Precision
from .process_group_strategy import ProcessGroupStrategy
from .single_device import SingleDeviceStrategy

__all__ = [
    "DDPStrategy",
    "Environment",
    "Pending",
    "Precision",
    "ProcessGroupStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "checkpoint_activations",
    "launch_function",
]
