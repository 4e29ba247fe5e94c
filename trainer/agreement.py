"""What the ranks must have in common, compared before anything depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from ..strategies.base import Strategy
from .config import TrainerConfig

# What one rank may show, write or name otherwise than another.
_OWN = ("logger", "enable_progress_bar", "enable_model_summary", "default_root_dir", "devices")


def options_of(config: TrainerConfig, strategy: Strategy) -> dict[str, str]:
    """The options that decide what a step is, as text, by name."""
    options = {
        field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config) if field.name not in _OWN
    }
    return options | {f"{type(strategy).__name__}({name})": value for name, value in strategy.options().items()}


def optimizers_of(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """The optimizers and the numbers of their groups, as text, by name."""
    told: dict[str, str] = {}
    for index, optimizer in enumerate(optimizers):
        place = f"optimizer {index}" if len(optimizers) > 1 else "optimizer"
        told[place] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (bool, int, float, tuple)):
                    told[f"{key} of {place}, group {number}"] = repr(value)  # pyright: ignore[reportUnknownArgumentType]
    return told


def compare(strategy: Strategy, mine: Mapping[str, str], what: str) -> None:
    """Compare texts over the ranks.

    Raises:
        RuntimeError: on every rank, naming the first that differs, with each rank's.
    """
    every = strategy.gather_objects(dict(mine), name=what)
    for name in dict.fromkeys(name for theirs in every for name in theirs):
        values = [theirs.get(name, "(none)") for theirs in every]
        if len(set(values)) > 1:
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RuntimeError(
                f"the {what} differ from rank to rank: {name} ({each}). Expected the same on every rank."
            )
