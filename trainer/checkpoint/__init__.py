"""Checkpoints: a folder of safetensors weights, the state of training, each rank's state, and a manifest."""

from .folder import CheckpointError, is_checkpoint, newest_intact, remove_checkpoint
from .read import Checkpoint, read_checkpoint, read_rank_state
from .write import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "is_checkpoint",
    "newest_intact",
    "read_checkpoint",
    "read_rank_state",
    "remove_checkpoint",
    "write_checkpoint",
]
