"""A loader as a loop reads it: this rank's batches of an epoch, from any place in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ...callbacks.wording import counted
from ..randomness import derived_seed
from .samples import SeededSamples
from .sampling import SeededOrder, Shard, ShuffledOrder, WithEpoch, has_length, set_epoch
from .streams import Stateful, StreamShard


@dataclass(frozen=True)
class Place:
    """Where reading began inside an epoch, when a run was resumed."""

    epoch: int = -1
    batches: int = 0
    """Batches of this rank that count as done there."""
    items: int = 0
    """Items of the order that all ranks together had consumed there: samples, or batches where those are dealt."""
    ended: bool = False
    """Nothing was left of the epoch."""


@dataclass
class PreparedLoader:
    """What gives this rank its batches."""

    loader: Iterable[Any]
    """The user's, or a copy of it with this rank's samples."""

    length: int | None
    """Batches of this rank in the epoch, after the limit; None where it can't be known."""

    shard: Shard | StreamShard | None
    """Our sampler or stream in it, where the samples are dealt by us."""

    batch_size: int | None
    """Samples of a full batch of one rank, where it can be known."""

    given_batch_size: int | None = None
    """The same, as the program's loader has it."""

    worker_seed: int = 0
    """What the workers' random numbers depend on, besides the epoch."""

    dataset_size: int | None = None
    """Samples in the dataset, from which all ranks are dealt theirs; None where it can't be known."""

    dropped: int = 0
    """Samples of an epoch that no rank sees, with uneven shares or a short last batch; batches where those are dealt."""

    read_by_all: bool = False
    """Whether nobody deals the samples to the ranks, so that each reads all that the loader gives."""

    limit: int | None = None
    """Batches of an epoch at most."""

    stateful: Any = None
    """What has a state of its own that a checkpoint keeps for each rank: the loader, or its dataset."""

    read_ahead: int = 0
    """Batches that may be read before the one that is done."""

    begun_at: Place = field(default_factory=Place)
    _loaded: bool = False
    _asked_for: int = 0
    _notes: deque[tuple[int, Any]] = field(default_factory=deque[tuple[int, Any]])

    # --- what it is ------------------------------------------------------------------------

    @property
    def order(self) -> str | None:
        """What puts the samples in order; None where they are not dealt by us."""
        if self.shard is None:
            return None
        if isinstance(self.shard, StreamShard):
            return "the stream"
        order = self.shard.order
        if isinstance(order, ShuffledOrder):
            return "a shuffle"
        return type(order.sampler).__name__ if isinstance(order, SeededOrder) else "the dataset"

    def order_digest(self) -> str | None:
        """Of the running epoch's order, where a sampler of the user's gives it; None: the ranks' can't differ, or are meant to."""
        order = self.shard.order if isinstance(self.shard, Shard) else None
        return order.digest() if isinstance(order, SeededOrder) else None

    @property
    def items_per_batch(self) -> int:
        """Items that one batch of one rank takes of the order: samples, or 1 where batches or single samples are dealt."""
        return 1 if self._over_batches else self.batch_size or 1

    @property
    def _is_torchs(self) -> bool:
        return isinstance(self.loader, DataLoader)

    @property
    def _over_batches(self) -> bool:
        """Whether whole batches of the user's are dealt."""
        sampler = getattr(self.loader, "batch_sampler", None)
        return isinstance(sampler.sampler if isinstance(sampler, WithEpoch) else sampler, Shard)

    @property
    def batches_of_samples(self) -> BatchSampler | None:
        """What makes batches of our shard's samples; None where the shard is of batches, or of samples one by one."""
        batches: Any = getattr(self.loader, "batch_sampler", None)
        return batches if isinstance(batches, BatchSampler) else None

    @property
    def seeks(self) -> bool:
        """Whether reading can begin behind any item: then any number of ranks can go on inside an epoch."""
        if isinstance(self.shard, StreamShard):
            return not self.shard.by_workers
        return self.shard is not None and self.stateful is not self.loader

    @property
    def _state_is_place(self) -> bool:
        """Whether the state says where this rank is: a map-style dataset's does not, its samples are asked for."""
        return self.stateful is self.loader or isinstance(self.stateful, IterableDataset)

    def remarks(self) -> list[str]:
        """What whoever reads numbers of this loader should know."""
        found: list[str] = []
        if self.read_by_all:
            kind = type(self.loader).__name__
            found.append(f"not dealt: every rank reads all of it ({kind} is no DataLoader, so it is taken as it is)")
        if isinstance(self.shard, StreamShard) and self.shard.world_size > 1:
            found.append(
                f"{type(self.shard.dataset).__name__} is dealt: every rank reads all of its stream, and keeps a share (if it "
                "yields a share already, set use_distributed_sampler=False)"
            )
        if self.dropped and isinstance(self.shard, Shard):
            batches = self.batches_of_samples
            what = counted(self.dropped, "batch" if self._over_batches else "sample")
            reasons: list[str] = []
            if self.shard.dropped:
                reasons.append(f"can't be dealt evenly to {counted(self.shard.world_size, 'rank')}")
            if batches is not None and batches.drop_last:
                reasons.append("would fill no batch (drop_last=True)")
            found.append(
                f"{what} of each epoch left out: {'it' if self.dropped == 1 else 'they'} {' or '.join(reasons)}"
            )
        return found

    # --- reading ---------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch, and the random numbers of workers that are started for it."""
        if self.begun_at.epoch != epoch:
            self.begun_at = Place(epoch)
        self.length = self.length_of_epoch()
        set_epoch(self.loader, epoch)
        if self.shard is not None:
            generator: torch.Generator = self.loader.generator  # pyright: ignore
            generator.manual_seed(derived_seed(self.worker_seed, epoch, self.shard.rank, "workers"))

    def length_of_epoch(self) -> int | None:
        """Batches of this rank, those before the place where reading began included."""
        begun = self.begun_at
        if begun.ended:
            return begun.batches
        if self.shard is None or not (begun.items or begun.batches):
            length = len(self.loader) if has_length(self.loader) else None  # pyright: ignore
        else:
            length = None if self._items_left() is None else begun.batches + self.batches_in(self._items_left() or 0)
        if length is None or self.limit is None:
            return self.limit if length is None else length
        return min(length, self.limit)

    def _items_left(self) -> int | None:
        """This rank's items behind the place where reading began."""
        shard = self.shard
        source = shard.dataset if isinstance(shard, StreamShard) else None if shard is None else shard.order
        return None if shard is None or not has_length(source) else shard.left_from(self.begun_at.items)

    def batches_in(self, items: int) -> int:
        """Batches that so many items of one rank make."""
        size, batches = self.items_per_batch, self.batches_of_samples
        return items // size if batches is not None and batches.drop_last else -(-items // size)

    def batches(self, skip: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, from the one behind the first `skip`.

        Where we deal the samples, the skipped ones are not read, and a loader with a state goes on from it; else they
        are read and dropped.
        """
        placed, self._loaded = self._loaded and self._state_is_place, False
        if self.shard is not None:
            self.shard.start = self._items_done(skip) if self.seeks and not placed else 0
        left = iter(self.loader)
        if skip and not self.seeks and not placed:
            left = islice(left, skip, None)
        self._asked_for = 0
        if self.stateful is not None and self.read_ahead:
            left = self._with_notes(left, skip)
        if self.length is None or (self.stateful is not None and self.limit is None):
            return left  # to its end, which a loader with a state wants to see
        return islice(left, max(0, self.length - skip))  # joined ranks count on

    # --- where it is -----------------------------------------------------------------------

    def items_done(self, batches: int) -> int | None:
        """Items of the order that all ranks have consumed after so many batches of each; None: it can't be known."""
        return self._items_done(batches) if self.seeks else None

    def _items_done(self, batches: int) -> int:
        assert self.shard is not None
        begun = self.begun_at
        return begun.items + (batches - begun.batches) * self.items_per_batch * self.shard.world_size

    def begin_at(self, place: Place) -> None:
        """Go on inside an epoch that a run of another shape began."""
        self.begun_at = place
        self.length = self.length_of_epoch()

    def state_dict(self, batches: int, *, over: bool = False) -> dict[str, Any]:
        """The state of the loader or dataset as it was after so many batches; empty where it has none.

        `over`: the epoch is, so that the end has been seen, behind which a stream may begin anew.
        """
        if self.stateful is None:
            return {}
        workers = getattr(self.loader, "num_workers", None)
        if batches < self._asked_for and not over:  # more was read than is done, or it was seen that there is no more
            state = next(noted for given, noted in reversed(self._notes) if given <= batches)
        else:
            state = self.stateful.state_dict()
        return {"of": type(self.stateful).__name__, "num_workers": workers, "state": state}

    def load_state_dict(self, state: Mapping[str, Any], *, inside: bool) -> None:
        """Take back what `state_dict` returned, before the next iteration begins.

        Args:
            state: of this rank.
            inside: an epoch is gone on with. Between epochs a DataLoader begins anew: its state is that of an iteration.

        Raises:
            ValueError: it is of another kind of loader, or of another number of workers.
        """
        if not state or self.stateful is None or (not inside and self.stateful is self.loader and self._is_torchs):
            return
        here = {"of": type(self.stateful).__name__, "num_workers": getattr(self.loader, "num_workers", None)}
        for name, what in (("of", "state is that of a"), ("num_workers", "state was kept with num_workers =")):
            if state[name] != here[name]:
                raise ValueError(
                    f"the training loader's {what} {state[name]}, here it is {here[name]}: expected the same. Use the same, or "
                    "resume from a checkpoint of an epoch's end."
                )
        self.stateful.load_state_dict(state["state"])
        self._loaded = True

    def _with_notes(self, batches: Iterator[Any], given: int) -> Iterator[Any]:
        """The batches; before each is read, the state is noted: it may be read ahead of the step that a checkpoint follows."""
        self._notes = deque(maxlen=self.read_ahead + 2)
        while True:
            self._notes.append((given, self.stateful.state_dict()))
            given = self._asked_for = given + 1
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


def state_holder(loader: Any, shard: Shard | StreamShard | None) -> Any:
    """What has a state that a checkpoint must keep: a loader, or its dataset where that lives in this process.

    Where we deal, the place is ours to find again; what is left to keep is the dataset's own.
    """
    own = loader if isinstance(loader, Stateful) else None
    if not isinstance(loader, DataLoader):
        return own
    dataset = cast("Any", loader).dataset
    if isinstance(dataset, SeededSamples):
        dataset = dataset.dataset
    if isinstance(dataset, Stateful) and loader.num_workers == 0:
        return dataset
    return own if shard is None or isinstance(dataset, Stateful) else None
