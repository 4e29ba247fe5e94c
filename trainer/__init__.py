"""The loop, the task, data, metrics and checkpoints."""

from ..strategies.error_file import record_uncaught_errors
from .batch_size import largest_batch
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .data.combined import CombinedLoader
from .data_module import DataModule
from .divergence import DivergedError
from .overrides import from_command_line
from .randomness import seed_everything
from .schedules import scaled_lr, warmup_schedule
from .task import Task
from .trainer import Trainer

__all__ = [
    "CheckpointError",
    "CombinedLoader",
    "DataModule",
    "DivergedError",
    "Task",
    "Trainer",
    "TrainerConfig",
    "from_command_line",
    "largest_batch",
    "scaled_lr",
    "seed_everything",
    "warmup_schedule",
]

record_uncaught_errors()  # under torch's agent; from here on, to see also what fails before a Trainer is built
