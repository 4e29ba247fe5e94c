"""The loop, the task, data, metrics and checkpoints."""

from ..strategies.error_file import record_uncaught_errors
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .data.combined import CombinedLoader
from .data_module import DataModule
from .overrides import from_command_line
from .randomness import seed_everything
from .task import Task
from .trainer import Trainer

__all__ = [
    "CheckpointError",
    "CombinedLoader",
    "DataModule",
    "Task",
    "Trainer",
    "TrainerConfig",
    "from_command_line",
    "seed_everything",
]

record_uncaught_errors()  # under torch's agent; from here on, to see also what fails before a Trainer is built
