"""Preparing the user's loaders: deal their samples to the ranks, limit them, and know their lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from .prepared import PreparedLoader, state_holder
from .samples import SeededSamples
from .sampling import SeededOrder, Shard, ShuffledOrder, WithEpoch, generators_of, has_length
from .streams import StreamShard, deal_stream
from .streams import deals_itself as stream_deals_itself


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
    per_sample_seed: bool = False
    """What a dataset draws for a sample depends on (seed, epoch, index) only."""
    batch_size_here: Callable[[int | None], int | None] = lambda given: given
    """The batch size of a rank, from that of the program's loader."""

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
    keeps its order and is dealt out. One over an IterableDataset reads a part of its stream. torch's
    DistributedSampler, streams that deal themselves, and any other iterable, are taken as they are.

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
    length = prepared.length_of_epoch()
    prepared.limit = limit_of(length, most, limit, name)
    prepared.length = prepared.length_of_epoch()
    dataset: Any = getattr(cast("Any", loader), "dataset", None)
    if has_length(dataset) and (prepared.shard is not None or dealing.strategy.world_size == 1):
        prepared.dataset_size = len(dataset)
    if prepared.shard is not None and prepared.length == length:  # a limit leaves out more, as it was told to
        prepared.dropped = _dropped(prepared)
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
    return None if prepared.length_of_epoch() is None else prepared.batches_in(len(_share(prepared.shard, 0)))


def _share(shard: Shard | StreamShard, rank: int) -> Shard | StreamShard:
    share = copy.copy(shard)
    share.rank = rank
    return share


def _dropped(prepared: PreparedLoader) -> int:
    """Items that no rank sees: those beyond the even shares, and those of last batches that are dropped."""
    shard, batches = prepared.shard, prepared.batches_of_samples
    if not isinstance(shard, Shard) or not has_length(shard.order):
        return 0
    size = 1 if batches is None or not batches.drop_last else batches.batch_size
    seen = sum(len(_share(shard, rank)) // size * size for rank in range(shard.world_size))
    return len(shard.order) - seen  # pyright: ignore


def limit_of(length: int | None, most: int | None, limit: int | float, name: str) -> int | None:
    """Batches of an epoch at most; None: all there are."""
    if isinstance(limit, int):
        return limit
    if limit == 1.0:
        return None
    option = LIMITS[name]
    if length is None or most is None:
        raise ValueError(f"{option}={limit}: the {name} loader has no length to take a share of; give a number (int).")
    share = int(most * limit)  # of the longest rank, so that it is the same share on any number of ranks
    if not share and limit > 0:
        count = counted(most, f"{name} batch")
        raise ValueError(f"{option}={limit} of {count} is none: expected at least {1 / most:.3g}.")
    return share


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
    """The loader with this rank's samples, not limited yet; and the length it had on each rank."""
    dealable = dealing.enabled and isinstance(loader, DataLoader)
    data_loader = cast("DataLoader[Any]", loader) if dealable else None
    sampler, batch_size, drop_last = _sampler_of(data_loader)
    seed, lengths = _agree(loader, data_loader, sampler, name, dealing)
    given = _batch_size(loader)
    if data_loader is not None and _is_stream(data_loader):
        shard, changed = _with_stream_shard(data_loader, seed, dealing)
    elif data_loader is not None and sampler is not None:
        order = _order(sampler, len(data_loader.dataset), seed, dealing)  # pyright: ignore
        shard, changed = _with_shard(data_loader, order, batch_size, drop_last, dealing)
    else:
        if dealing.per_sample_seed and dealing.training:
            raise ValueError(
                f"per_sample_seed=True with a {type(cast('Any', loader)).__name__} whose samples are not dealt by the "
                "trainer: what a sample's random numbers should depend on is not known. Give a DataLoader without a "
                "DistributedSampler, and leave use_distributed_sampler on."
            )
        held = state_holder(loader, None)
        return PreparedLoader(cast("Any", loader), None, None, given, given, dealing.seed, stateful=held), lengths
    # A copy, since the class of the loader may have a constructor of its own; it has begun no iteration.
    # A new iterator draws a seed for its workers. From a generator of its own the draw disturbs nobody: a resumed run,
    # or one with another validation, trains with the same random numbers.
    dealt = copy.copy(data_loader)
    vars(dealt).update(changed, generator=torch.Generator(), _iterator=None)
    held = state_holder(dealt, shard)
    return PreparedLoader(dealt, None, shard, _batch_size(dealt), given, dealing.seed, stateful=held), lengths


def _with_shard(
    loader: DataLoader[Any], order: Iterable[Any], batch_size: int | None, drop_last: bool, dealing: Dealing
) -> tuple[Shard, dict[str, Any]]:
    """This rank's part of an order, and what a loader is to be given to read it."""
    shard = Shard(order, dealing.strategy.rank, dealing.strategy.world_size, even=dealing.even)
    batch_size = dealing.batch_size_here(batch_size)
    of_batches = batch_size is None and loader.batch_sampler is not None  # whole batches are dealt out
    changed: dict[str, Any] = {}
    indices: Any = shard
    if dealing.per_sample_seed:
        indices = WithEpoch(shard, of_batches=of_batches)
        changed["dataset"] = SeededSamples(loader.dataset, dealing.seed)
    if of_batches:
        return shard, {**changed, "batch_sampler": indices}
    changed["sampler"] = indices
    if batch_size is not None:
        changed["batch_sampler"] = BatchSampler(indices, batch_size, drop_last)
        changed |= {} if loader.batch_size is None else {"batch_size": batch_size}
    return shard, changed


def _with_stream_shard(loader: DataLoader[Any], seed: int, dealing: Dealing) -> tuple[StreamShard, dict[str, Any]]:
    """This rank's part of a stream, and what a loader is to be given to read it."""
    batch_size = dealing.batch_size_here(loader.batch_size)
    rank, ranks = dealing.strategy.rank, dealing.strategy.world_size
    shard = deal_stream(loader, rank, ranks, batch_size or 1, seed, even=dealing.even)
    changed: dict[str, Any] = {"dataset": shard}
    if batch_size is not None:
        batches = BatchSampler(cast("Any", loader.sampler), batch_size, loader.drop_last)
        changed |= {"batch_sampler": batches, "batch_size": batch_size}
    return shard, changed


def _is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads an IterableDataset that is to be dealt."""
    return isinstance(loader.dataset, IterableDataset) and not stream_deals_itself(loader.dataset)


def _sampler_of(loader: DataLoader[Any] | None) -> tuple[Any, int | None, bool]:
    """What is to be dealt: a sampler with its batch size and drop_last, or a batch sampler; None: nothing."""
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return None, None, False
    sampler, batch_sampler = cast("Any", loader.sampler), cast("Any", loader.batch_sampler)
    if _deals_itself(loader):
        return None, None, False
    if batch_sampler is None:
        return sampler, None, False
    if type(batch_sampler) is not BatchSampler and not _is_torchdatas(batch_sampler):  # of the user's own
        return batch_sampler, None, False
    return batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last


def _agree(
    given: Any, loader: DataLoader[Any] | None, sampler: Any, name: str, dealing: Dealing
) -> tuple[int, list[int | None]]:
    """The seed of the order, and each rank's number of batches before anything is dealt.

    A generator of the user's stands for its seed; rank 0's counts, or shards would overlap.

    Raises:
        ValueError: the ranks' datasets differ in length, or their samplers in kind.
    """
    generators = generators_of(sampler)
    if loader is not None and loader.generator is None and _is_torchdatas(sampler):
        generators = []  # torchdata's sampler has one that nobody asked for
    own = generators[0].initial_seed() if generators else None
    samples = len(loader.dataset) if loader is not None and sampler is not None else None  # pyright: ignore
    length = len(given) if has_length(given) else None
    kind = type(sampler).__name__
    told = dealing.strategy.gather_objects((samples, own, length, kind), name=f"{name} data")
    datasets, seeds, lengths, kinds = (list(values) for values in zip(*told, strict=True))
    if len(set(datasets)) > 1:
        each = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(datasets))
        raise ValueError(
            f"the {name} dataset differs from rank to rank ({each} samples): expected the same on every rank, from which "
            "each is dealt its share. If each rank reads a share of its own, say so with use_distributed_sampler=False."
        )
    if len(set(kinds)) > 1:
        each = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(
            f"the {name} loader's sampler differs from rank to rank ({each}): expected the same on every rank, since all are "
            "dealt one order. Give the same shuffle, sampler or batch_sampler on each."
        )
    return dealing.seed if seeds[0] is None else seeds[0], lengths


def _order(sampler: Any, length: int, seed: int, dealing: Dealing) -> Iterable[Any]:
    if type(sampler) is SequentialSampler:
        return range(length)
    shuffles = type(sampler) is RandomSampler or (_is_torchdatas(sampler) and type(sampler).__name__ == "RandomSampler")
    if shuffles and not sampler.replacement and sampler.num_samples == length:
        return ShuffledOrder(length, seed) if dealing.shuffle else range(length)
    return SeededOrder(sampler, seed)


def _is_torchdatas(sampler: Any) -> bool:
    """Whether a sampler is one that torchdata's StatefulDataLoader made for itself."""
    return type(sampler).__module__ == "torchdata.stateful_dataloader.sampler"


def _deals_itself(loader: Any) -> bool:
    """Whether the loader's dataset or one of its samplers gives each rank another share."""
    if stream_deals_itself(getattr(loader, "dataset", None)):
        return True
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    return any(map(_already_dealt, (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))))


def _already_dealt(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
