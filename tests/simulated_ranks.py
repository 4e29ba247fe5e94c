"""Loaders as each of several ranks would read them, in one process."""

from __future__ import annotations

from typing import Any

import torch
from samestep.strategies import Environment, Strategy
from samestep.trainer.data.combined import CombinedLoader, prepare_combined
from samestep.trainer.data.loaders import Dealing, prepare_loader
from samestep.trainer.data.prepared import PreparedLoader


class Place(Strategy):
    """One rank of several, without the others."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.environment = Environment(rank, rank, ranks, ranks, launched=True)


def prepared(
    loader: Any, rank: int = 0, ranks: int = 1, *, training: bool = True, seed: int = 0, limit: Any = 1.0, **how: Any
) -> PreparedLoader:
    dealing = Dealing(Place(rank, ranks), seed, training, **how)
    name = "training" if training else "validation"
    if isinstance(loader, CombinedLoader):
        return prepare_combined(loader, name, limit, dealing)
    return prepare_loader(loader, name, limit, dealing)


def plain(batch: Any) -> Any:
    """A batch as lists and numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(item) for key, item in batch.items()}
    return type(batch)(plain(item) for item in batch) if isinstance(batch, (list, tuple)) else batch


def batches(loader: PreparedLoader, epoch: int = 0, skip: int = 0) -> list[Any]:
    """The batches of an epoch, or of what is left of it."""
    loader.set_epoch(epoch)
    return [plain(batch) for batch in loader.batches(skip)]


def dealt_back(shards: list[list[Any]]) -> list[Any]:
    """The order that was dealt to the ranks in turn."""
    return [shards[place % len(shards)][place // len(shards)] for place in range(sum(map(len, shards)))]
