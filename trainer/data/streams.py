"""Dealing an IterableDataset: every reader goes through the stream, and keeps its share.

Batch j of all ranks together is items j·W·B … (j+1)·W·B − 1 of the stream, for W ranks with batches of B; of these, rank r
takes every W-th from the r-th on. With n workers a rank's batches come from them in turn: worker w reads those with
j mod n = w. So each step sees the very items that one rank with batch W·B, and without workers, sees; and after any step
the ranks together have consumed a prefix of the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from types import CodeType
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..randomness import RandomStream, derived_seed


@runtime_checkable
class Stateful(Protocol):
    """What can say where it stands, and go on from there: torchdata's protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from there."""
        ...


class StreamShard(IterableDataset[Any]):
    """This rank's part of a stream; in a worker, this worker's part of it.

    The stream draws random numbers of its own, a function of (seed, epoch): one that shuffles gives all readers the
    same order.

    Args:
        dataset: gives the whole stream to each reader.
        rank: whose part.
        world_size: how many parts.
        batch_size: items of a batch of one rank.
        seed: of the stream's random numbers.
        even: leave out the last items that can't be dealt to all ranks (training).
        by_workers: the dataset gives each worker another part by itself: what a worker gets is dealt to the ranks only.
    """

    def __init__(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        batch_size: int,
        seed: int,
        *,
        even: bool,
        by_workers: bool = False,
    ) -> None:
        self.dataset, self.rank, self.world_size, self.batch_size = dataset, rank, world_size, batch_size
        self.seed, self.even, self.by_workers = seed, even, by_workers
        # Epoch and start: in shared memory, since workers may outlive an epoch.
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._batches_read = 0
        self._numbers: RandomStream | None = None
        self._loaded = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the random numbers."""
        self._place[0] = epoch

    @property
    def start(self) -> int:
        """Items of the stream behind which an iteration begins."""
        return cast("int", self._place[1].item())

    @start.setter
    def start(self, items: int) -> None:
        self._place[1] = items

    def __len__(self) -> int:
        """Items of this rank in a whole epoch.

        Raises:
            TypeError: it can't be known.
        """
        if self.by_workers:
            raise TypeError("how long the workers' parts are is not known")
        return self.left_from(0)

    def left_from(self, start: int) -> int:
        """Items of this rank behind the first `start` of the stream."""
        left = max(0, len(self.dataset) - start)
        return left // self.world_size if self.even else len(range(self.rank, left, self.world_size))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None or self.by_workers else (info.num_workers, info.id)
        epoch, start = cast("list[int]", self._place.tolist())
        loaded, self._loaded = self._loaded, False
        if not loaded:
            # A dataset that divides its stream among workers draws other numbers in each.
            reader = info.id if info is not None and self.by_workers else 0
            self._batches_read, self._numbers = 0, RandomStream(derived_seed(self.seed, epoch, "stream", reader))
        numbers = self._numbers
        assert numbers is not None
        with numbers, self._seen_whole():
            if callable(getattr(self.dataset, "set_epoch", None)):  # in a worker that began in another epoch
                self.dataset.set_epoch(epoch)
            items = cast("Iterator[Any]", iter(self.dataset))
            if not loaded:
                next(islice(items, start, start), None)
        size, ended = self.world_size * self.batch_size, False
        while not ended:
            my_turn = self._batches_read % workers == worker
            with numbers, self._seen_whole():
                mine, count = [], 0
                for place, item in enumerate(islice(items, size)):
                    count += 1
                    if my_turn and place % self.world_size == self.rank:
                        mine.append(item)
            self._batches_read += 1
            ended = count < size
            if ended and self.even:
                del mine[count // self.world_size :]
            yield from mine

    @contextmanager
    def _seen_whole(self) -> Generator[None]:
        """Let the dataset believe that there are no workers, so that it gives all of its stream to each."""
        if self.by_workers:
            yield
            return
        info, torch_worker._worker_info = torch_worker._worker_info, None  # pyright: ignore[reportPrivateUsage]
        try:
            yield
        finally:
            torch_worker._worker_info = info  # pyright: ignore[reportPrivateUsage]


class StatefulStreamShard(StreamShard):
    """A `StreamShard` of a dataset that can go on where it was: without reading again what it has read."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, behind the last batch that was read."""
        numbers = None if self._numbers is None else self._numbers.state_dict()
        return {"dataset": self.dataset.state_dict(), "batches_read": self._batches_read, "numbers": numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on there."""
        self.dataset.load_state_dict(state_dict["dataset"])
        self._loaded = state_dict["numbers"] is not None
        if self._loaded:
            self._batches_read, self._numbers = state_dict["batches_read"], RandomStream(self.seed)
            self._numbers.load_state_dict(state_dict["numbers"])


# Libraries whose streams give each rank and worker another part, by themselves.
_DEAL_THEMSELVES = {"streaming", "litdata", "webdataset"}


def deals_itself(dataset: Any) -> bool:
    """Whether a stream gives each rank another part by itself: as far as can be known."""
    if getattr(dataset, "_distributed", None) is not None:  # datasets.distributed.split_dataset_by_node
        return True
    libraries = {kind.__module__.partition(".")[0] for kind in type(dataset).__mro__}
    return bool(libraries & _DEAL_THEMSELVES) or isinstance(dataset, torch.utils.data.IterDataPipe)


def divides_among_workers(dataset: Any) -> bool:
    """Whether one of the class's methods asks which worker it runs in, to give each worker another part."""
    return any(asks_for_worker(method) for kind in type(dataset).__mro__ for method in vars(kind).values())


def asks_for_worker(function: Any) -> bool:
    """Whether a function asks which worker it runs in."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return isinstance(code, CodeType) and "get_worker_info" in _names(code)


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, those of functions in it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def deal_stream(
    loader: DataLoader[Any], rank: int, world_size: int, batch_size: int, seed: int, *, even: bool
) -> StreamShard:
    """This rank's part of the stream that a loader reads, stateful where the dataset is.

    Raises:
        ValueError: `worker_init_fn` changes the dataset in each worker.
    """
    if asks_for_worker(loader.worker_init_fn):
        raise ValueError(
            "worker_init_fn asks which worker it runs in, so as to give each another part of the IterableDataset: what it "
            "changes would not reach the dataset when its stream is dealt. Ask in the dataset's __iter__, or give each "
            "rank and worker its part there, and say so with Trainer(use_distributed_sampler=False)."
        )
    kind = StatefulStreamShard if isinstance(loader.dataset, Stateful) else StreamShard
    by_workers = loader.num_workers > 1 and divides_among_workers(loader.dataset)
    return kind(loader.dataset, rank, world_size, batch_size, seed, even=even, by_workers=by_workers)
