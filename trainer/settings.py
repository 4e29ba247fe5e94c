"""torch's global switches for the length of a run."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

from .config import TrainerConfig


@contextmanager
def torch_settings(config: TrainerConfig) -> Generator[None]:
    """Set what `deterministic`, `benchmark` and `detect_anomaly` say, and put it back afterwards."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_benchmark = torch.backends.cudnn.benchmark
    try:
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
            torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
        if config.benchmark is not None:
            torch.backends.cudnn.benchmark = config.benchmark
        with torch.autograd.set_detect_anomaly(config.detect_anomaly or torch.is_anomaly_enabled()):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        torch.backends.cudnn.benchmark = was_benchmark
