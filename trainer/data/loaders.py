"""Preparing the user's loaders: deal their samples to the ranks, limit them, and know their lengths."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ...strategies.base import Strategy
from ..randomness import derived_seed
from .sampling import SeededOrder, Shard, ShuffledOrder, has_length, set_epoch


@dataclass
class PreparedLoader:
    """A loader as a loop reads it."""

    loader: Iterable[Any]
    """What gives this rank's batches."""

    length: int | None
    """Batches of this rank in an epoch, after the limit; None where it can't be known."""

    shard: Shard | None
    """Our sampler in it, where the samples are dealt by us."""

    batch_size: int | None
    """Samples of a full batch of one rank, where it can be known."""

    worker_seed: int = 0
    """What the workers' random numbers depend on, besides the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch, and the workers' random numbers."""
        set_epoch(self.loader, epoch)
        if self.shard is not None:
            generator: torch.Generator = self.loader.generator  # pyright: ignore
            generator.manual_seed(derived_seed(self.worker_seed, epoch, self.shard.rank, "workers"))

    def batches(self, skip: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, from the one behind the first `skip`.

        Where we deal the samples, the skipped ones are not read; else they are read and dropped.
        """
        if skip and self.shard is not None:
            over_batches = isinstance(getattr(self.loader, "batch_sampler", None), Shard)
            per_batch = 1 if over_batches else self.batch_size or 1
            self.shard.start = skip * per_batch * self.shard.world_size
            skipped = iter(self.loader)
        else:
            skipped = islice(iter(self.loader), skip, None) if skip else iter(self.loader)
        return skipped if self.length is None else islice(skipped, self.length - skip)


@dataclass(frozen=True)
class Dealing:
    """How to deal the samples of a loader."""

    strategy: Strategy
    seed: int
    training: bool
    enabled: bool = True
    """`use_distributed_sampler`"""
    shuffle: bool = True
    """False: read in order even what is to be shuffled (`overfit_batches`)."""


LIMITS = {
    "training": "limit_train_batches",
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "prediction": "limit_predict_batches",
}
"""The option that limits the loader of each name."""


def prepare_loader(loader: Any, name: str, limit: int | float, dealing: Dealing) -> PreparedLoader:
    """Deal a loader's samples to the ranks, and limit its batches.

    A DataLoader over a map-style dataset gets a sampler of ours: shuffled, if it was; a sampler of the user's own
    keeps its order and is dealt out; torch's DistributedSampler, and any other iterable, is taken as it is.

    Args:
        loader: the user's.
        name: what it is for, a key of `LIMITS`.
        limit: batches (int), or share of them (float).
        dealing: how.

    Raises:
        TypeError, ValueError: it can't be iterated or dealt out, or has no batch.
    """
    if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes)):
        raise TypeError(f"the {name} loader is a {type(loader).__name__}: expected a DataLoader or another iterable.")
    if isinstance(loader, Iterator):
        raise TypeError(
            f"the {name} loader is an iterator, which is used up after one epoch: expected an iterable, such as a "
            "DataLoader, that starts anew with each `iter`."
        )
    dealt, shard = _deal(cast("Iterable[Any]", loader), name, dealing)
    length = len(dealt) if has_length(dealt) else None  # pyright: ignore
    total = length
    if length is not None and dealing.strategy.world_size > 1 and shard is not None and not dealing.training:
        total = len(shard.order)  # pyright: ignore[reportArgumentType]  # on other ranks there may be batches
    if total == 0:
        raise ValueError(_why_empty(loader, name, dealing))
    return PreparedLoader(dealt, _limited(length, limit, name), shard, _batch_size(dealt), dealing.seed)


def _limited(length: int | None, limit: int | float, name: str) -> int | None:
    option = LIMITS[name]
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 1.0:
        return length
    if length is None:
        raise ValueError(f"{option}={limit}: the {name} loader has no length to take a share of; give a number (int).")
    share = int(length * limit)
    if length and not share and limit > 0:
        raise ValueError(f"{option}={limit} of {length} {name} batches is none: expected at least {1 / length:.3g}.")
    return share


def _why_empty(loader: Any, name: str, dealing: Dealing) -> str:
    dataset = getattr(loader, "dataset", None)
    samples = f" (a dataset of {len(cast('Any', dataset))} samples)" if has_length(dataset) else ""
    ranks = dealing.strategy.world_size
    dealt = f" when dealt to {ranks} ranks" if ranks > 1 else ""
    drop = ", drop_last=True" if getattr(loader, "drop_last", False) else ""
    return (
        f"the {name} loader has no batch{dealt}{samples}{drop}: expected one or more on every rank. "
        "Check the dataset, the batch size, and drop_last."
    )


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _deal(loader: Iterable[Any], name: str, dealing: Dealing) -> tuple[Iterable[Any], Shard | None]:
    ranks = dealing.strategy.world_size
    if not dealing.enabled or not isinstance(loader, DataLoader):
        return loader, None  # pyright: ignore[reportUnknownVariableType]
    data_loader = cast("DataLoader[Any]", loader)
    if isinstance(data_loader.dataset, IterableDataset):
        if ranks > 1:
            raise ValueError(
                f"the {name} loader reads an IterableDataset: on {ranks} ranks every rank would read all of it, and "
                "dealing it out is not supported yet. Let the dataset yield another share on each rank (RANK and "
                "WORLD_SIZE are in the environment) and say so with Trainer(use_distributed_sampler=False)."
            )
        return data_loader, None
    sampler, batch_sampler = cast("Any", data_loader.sampler), cast("Any", data_loader.batch_sampler)
    if (
        _already_dealt(sampler)
        or _already_dealt(getattr(batch_sampler, "sampler", None))
        or _already_dealt(batch_sampler)
    ):
        return data_loader, None

    def shard(order: Iterable[Any]) -> Shard:
        return Shard(order, dealing.strategy.rank, ranks, even=dealing.training)

    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        # A batch sampler of the user's own: whole batches are dealt out.
        dealt = shard(SeededOrder(batch_sampler, dealing.seed))
        samplers: dict[str, Any] = {"batch_sampler": dealt}
    elif batch_sampler is not None:
        dealt = shard(_order(batch_sampler.sampler, data_loader, dealing))
        samplers = {"sampler": dealt, "batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
    else:
        dealt = shard(_order(sampler, data_loader, dealing))
        samplers = {"sampler": dealt, "batch_size": None}
    replaced = _rebuilt(data_loader, name, ranks, samplers)
    return (data_loader, None) if replaced is None else (replaced, dealt)


def _order(sampler: Any, loader: DataLoader[Any], dealing: Dealing) -> Iterable[Any]:
    length = len(loader.dataset)  # pyright: ignore
    if type(sampler) is SequentialSampler:
        return range(length)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        if not dealing.shuffle:
            return range(length)
        # A generator given by the user stands for its seed; rank 0's counts, or the shards would overlap.
        generator: torch.Generator | None = cast("Any", sampler).generator
        own = None if generator is None else generator.initial_seed()
        own = dealing.strategy.broadcast(own, name="seed of the sampler")
        return ShuffledOrder(length, dealing.seed if own is None else own)
    return SeededOrder(sampler, dealing.seed)


def _already_dealt(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))


_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def _rebuilt(loader: DataLoader[Any], name: str, ranks: int, samplers: dict[str, Any]) -> DataLoader[Any] | None:
    """A loader of the same class and options around our sampler.

    None: its class takes other arguments, and on one rank it can stay as it is.
    """
    options = {
        option: getattr(loader, option) for option in _OPTIONS if getattr(loader, option, None) not in (None, "")
    }
    # A new iterator draws a seed for its workers. From a generator of its own the draw disturbs nobody: a resumed run,
    # or one with another validation, trains with the same random numbers.
    options["generator"] = torch.Generator()
    kind = cast("Any", type(loader))
    if kind is not DataLoader:
        parameters = inspect.signature(kind.__init__).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            missing = [option for option in ("dataset", "generator", *samplers) if option not in parameters]
            if missing:
                if ranks == 1:
                    return None
                raise TypeError(
                    f"the {name} loader is a {kind.__name__}, whose __init__ takes no {', '.join(missing)}: its samples "
                    f"can't be dealt to {ranks} ranks. Let it take a sampler, or deal them yourself and say so with "
                    "Trainer(use_distributed_sampler=False)."
                )
            options = {option: value for option, value in options.items() if option in parameters}
    return cast("DataLoader[Any]", kind(loader.dataset, **options, **samplers))
