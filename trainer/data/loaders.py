"""Preparing the user's loaders: deal their samples to the ranks, limit them, and know their lengths."""

from __future__ import annotations

import copy
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

from ...callbacks.wording import counted
from ...strategies.base import Strategy
from ..randomness import derived_seed
from .sampling import SeededOrder, Shard, ShuffledOrder, generators_of, has_length, set_epoch


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

    dataset_size: int | None = None
    """Samples in the dataset, from which all ranks are dealt theirs; None where it can't be known."""

    dropped: int = 0
    """Samples of an epoch that no rank sees, with uneven shares or a short last batch; batches where those are dealt."""

    read_by_all: bool = False
    """Whether nobody deals the samples to the ranks, so that each reads all that the loader gives."""

    @property
    def order(self) -> str | None:
        """What puts the samples in order; None where they are not dealt by us."""
        if self.shard is None:
            return None
        order = self.shard.order
        if isinstance(order, ShuffledOrder):
            return "a shuffle"
        return type(order.sampler).__name__ if isinstance(order, SeededOrder) else "the dataset"

    def remarks(self) -> list[str]:
        """What whoever reads numbers of this loader should know."""
        found: list[str] = []
        if self.read_by_all:
            kind = type(self.loader).__name__
            found.append(f"not dealt: every rank reads all of it ({kind} is no DataLoader, so it is taken as it is)")
        if self.dropped and self.shard is not None:
            batches = getattr(self.loader, "batch_sampler", None)
            what = counted(self.dropped, "batch" if isinstance(batches, Shard) else "sample")
            reasons: list[str] = []
            if self.shard.dropped:
                reasons.append(f"can't be dealt evenly to {counted(self.shard.world_size, 'rank')}")
            if getattr(batches, "drop_last", False):
                reasons.append("would fill no batch (drop_last=True)")
            found.append(
                f"{what} of each epoch left out: {'it' if self.dropped == 1 else 'they'} {' or '.join(reasons)}"
            )
        return found

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch, and the random numbers of workers that are started for it."""
        set_epoch(self.loader, epoch)
        if self.shard is not None:
            generator: torch.Generator = self.loader.generator  # pyright: ignore
            generator.manual_seed(derived_seed(self.worker_seed, epoch, self.shard.rank, "workers"))

    def batches(self, skip: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, from the one behind the first `skip`.

        Where we deal the samples, the skipped ones are not read; else they are read and dropped.
        """
        if self.shard is not None:
            over_batches = isinstance(getattr(self.loader, "batch_sampler", None), Shard)
            per_batch = 1 if over_batches else self.batch_size or 1
            self.shard.start = skip * per_batch * self.shard.world_size
            left = iter(self.loader)
        else:
            left = islice(iter(self.loader), skip, None) if skip else iter(self.loader)
        return left if self.length is None else islice(left, max(0, self.length - skip))  # joined ranks count on


@dataclass(frozen=True)
class Dealing:
    """How to deal the samples of a loader."""

    strategy: Strategy
    seed: int
    training: bool
    enabled: bool = True
    """`use_distributed_sampler`"""
    shuffle: bool = True
    """False: read in order even what is to be shuffled (`overfit_batches`, and predictions)."""
    joins: bool = False
    """Ranks may train on another number of samples; False: the few that are left over are dropped."""

    @property
    def even(self) -> bool:
        """Whether every rank gets equally many."""
        return self.training and not self.joins


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
    prepared, lengths = _deal(cast("Iterable[Any]", loader), name, dealing)
    most = _most_batches(prepared, lengths, dealing)
    if most == 0:
        raise ValueError(_why_empty(loader, name, dealing))
    length = len(prepared.loader) if has_length(prepared.loader) else None  # pyright: ignore
    prepared.length = _limited(length, most, limit, name)
    dataset: Any = getattr(cast("Any", loader), "dataset", None)
    if has_length(dataset) and (prepared.shard is not None or dealing.strategy.world_size == 1):
        prepared.dataset_size = len(dataset)
    if prepared.shard is not None and prepared.length == length:  # a limit leaves out more, as it was told to
        prepared.dropped = _dropped(prepared.shard, _batches_of(prepared))
    elif prepared.shard is None and dealing.strategy.world_size > 1 and dealing.enabled:
        prepared.read_by_all = not _deals_itself(loader)
    return prepared


def _most_batches(prepared: PreparedLoader, lengths: list[int | None], dealing: Dealing) -> int | None:
    """The batches of the rank that has the most. In training 0 where one rank has none: all would wait for it."""
    if prepared.shard is None:
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        return 0 if dealing.even and 0 in known else max(known)
    if not has_length(prepared.loader):
        return None
    first = copy.copy(prepared.shard)
    first.rank = 0
    batches = _batches_of(prepared)
    return len(first) if batches is None else len(BatchSampler(first, batches.batch_size, batches.drop_last))


def _batches_of(prepared: PreparedLoader) -> BatchSampler | None:
    """What makes batches of our shard's samples; None where the shard is of batches, or of samples one by one."""
    batches: Any = getattr(prepared.loader, "batch_sampler", None)
    return batches if isinstance(batches, BatchSampler) else None


def _dropped(shard: Shard, batches: BatchSampler | None) -> int:
    """Items that no rank sees: those beyond the even shares, and those of last batches that are dropped."""
    if not has_length(shard.order):
        return 0
    seen = 0
    for rank in range(shard.world_size):
        share = copy.copy(shard)
        share.rank = rank
        size = 1 if batches is None or not batches.drop_last else batches.batch_size
        seen += len(share) // size * size
    return len(shard.order) - seen  # pyright: ignore


def _limited(length: int | None, most: int | None, limit: int | float, name: str) -> int | None:
    option = LIMITS[name]
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 1.0:
        return length
    if length is None or most is None:
        raise ValueError(f"{option}={limit}: the {name} loader has no length to take a share of; give a number (int).")
    share = int(most * limit)  # of the longest rank, so that it is the same share on any number of ranks
    if not share and limit > 0:
        count = counted(most, f"{name} batch")
        raise ValueError(f"{option}={limit} of {count} is none: expected at least {1 / most:.3g}.")
    return min(length, share)


def _why_empty(loader: Any, name: str, dealing: Dealing) -> str:
    dataset = getattr(loader, "dataset", None)
    samples = f" (a dataset of {counted(len(cast('Any', dataset)), 'sample')})" if has_length(dataset) else ""
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


def _deal(loader: Iterable[Any], name: str, dealing: Dealing) -> tuple[PreparedLoader, list[int | None]]:
    """The loader with this rank's samples, whose length is not known yet; and the length it had on each rank."""
    dealable = dealing.enabled and isinstance(loader, DataLoader)
    data_loader = cast("DataLoader[Any]", loader) if dealable else None
    sampler, batch_size, drop_last = _sampler_of(data_loader)
    seed, lengths = _agree(loader, data_loader, sampler, name, dealing)
    if data_loader is None or sampler is None:
        return PreparedLoader(cast("Any", loader), None, None, _batch_size(loader), dealing.seed), lengths
    order = _order(sampler, len(data_loader.dataset), seed, dealing)  # pyright: ignore
    shard = Shard(order, dealing.strategy.rank, dealing.strategy.world_size, even=dealing.even)
    if batch_size is None and data_loader.batch_sampler is not None:
        changed: dict[str, Any] = {"batch_sampler": shard}  # whole batches are dealt out
    elif data_loader.batch_sampler is not None:
        changed = {"sampler": shard, "batch_sampler": BatchSampler(shard, batch_size or 1, drop_last)}
    else:
        changed = {"sampler": shard}
    # A copy, since the class of the loader may have a constructor of its own; it has begun no iteration.
    # A new iterator draws a seed for its workers. From a generator of its own the draw disturbs nobody: a resumed run,
    # or one with another validation, trains with the same random numbers.
    dealt = copy.copy(data_loader)
    vars(dealt).update(changed, generator=torch.Generator(), _iterator=None)
    return PreparedLoader(dealt, None, shard, _batch_size(loader), dealing.seed), lengths


def _sampler_of(loader: DataLoader[Any] | None) -> tuple[Any, int | None, bool]:
    """What is to be dealt: a sampler with its batch size and drop_last, or a batch sampler; None: nothing."""
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return None, None, False
    sampler, batch_sampler = cast("Any", loader.sampler), cast("Any", loader.batch_sampler)
    if _deals_itself(loader):
        return None, None, False
    if batch_sampler is None:
        return sampler, None, False
    if type(batch_sampler) is not BatchSampler:  # of the user's own
        return batch_sampler, None, False
    return batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last


def _agree(
    given: Any, loader: DataLoader[Any] | None, sampler: Any, name: str, dealing: Dealing
) -> tuple[int, list[int | None]]:
    """The seed of the order, and each rank's number of batches before anything is dealt.

    A generator of the user's stands for its seed; rank 0's counts, or shards would overlap.

    Raises:
        ValueError: the ranks' datasets differ in length, or an IterableDataset would be read whole by each.
    """
    ranks = dealing.strategy.world_size
    if loader is not None and isinstance(loader.dataset, IterableDataset) and ranks > 1:
        raise ValueError(
            f"the {name} loader reads an IterableDataset: on {ranks} ranks every rank would read all of it, and "
            "dealing it out is not supported yet. Let the dataset yield another share on each rank (RANK and "
            "WORLD_SIZE are in the environment), and say so with Trainer(use_distributed_sampler=False)."
        )
    generators = generators_of(sampler)
    own = generators[0].initial_seed() if generators else None
    samples = len(loader.dataset) if loader is not None and sampler is not None else None  # pyright: ignore
    length = len(given) if has_length(given) else None
    told = dealing.strategy.gather_objects((samples, own, length), name=f"{name} data")
    datasets, seeds, lengths = (list(values) for values in zip(*told, strict=True))
    if len(set(datasets)) > 1:
        each = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(datasets))
        raise ValueError(
            f"the {name} dataset differs from rank to rank ({each} samples): expected the same on every rank, from which "
            "each is dealt its share. If each rank reads a share of its own, say so with use_distributed_sampler=False."
        )
    return dealing.seed if seeds[0] is None else seeds[0], lengths


def _order(sampler: Any, length: int, seed: int, dealing: Dealing) -> Iterable[Any]:
    if type(sampler) is SequentialSampler:
        return range(length)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return ShuffledOrder(length, seed) if dealing.shuffle else range(length)
    return SeededOrder(sampler, seed)


def _deals_itself(loader: Any) -> bool:
    """Whether one of the loader's samplers gives each rank another share."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    return any(map(_already_dealt, (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))))


def _already_dealt(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
