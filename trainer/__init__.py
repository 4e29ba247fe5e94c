"""The loop, the task, data, metrics and checkpoints."""

from ..strategies import process_groups
from ..strategies.error_file import record_uncaught_errors
from ..strategies.first_cause import PeerError
from .batch_size import largest_batch
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .data_module import DataModule
from .divergence import DivergedError
from .overrides import from_command_line
from .randomness import seed_everything
from .schedules import scaled_lr, warmup_schedule
from .signals import Interrupted, Preempted
from .task import Task
from .trainer import Trainer

__all__ = [
    "CheckpointError",
    "DataModule",
    "DivergedError",
    "Interrupted",
    "PeerError",
    "Preempted",
    "Task",
    "Trainer",
    "TrainerConfig",
    "from_command_line",
    "largest_batch",
    "scaled_lr",
    "seed_everything",
    "warmup_schedule",
]

process_groups.depart_at_exit()
record_uncaught_errors()  # under torch's agent; from here on, to see also what fails before a Trainer is built
