"""An IterableDataset on several ranks and workers: every item once, in the batches that one rank would see."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import run_ranks
from samestep.strategies import DDPStrategy
from samestep.trainer.randomness import rng_state
from simulated_ranks import batches, dealt_back, prepared
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset[int]):
    """0 … length−1."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.length


class Shuffled(Numbers):
    """In an order drawn from all three generators, item by item, with one more number for each item."""

    def __iter__(self) -> Iterator[Any]:
        left = list(range(self.length))
        while left:
            place = random.random() + np.random.rand() + torch.rand(()).item()
            yield [left.pop(int(place / 3 * len(left))), random.randrange(10**6)]


class DividedByWorkers(Numbers):
    """Gives each worker another part, as torch's documentation does it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length)[info.id :: info.num_workers] if info else range(self.length))


class Resumable(Numbers):
    """Goes on where it was, and counts what it reads."""

    at = reads = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            self.reads += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def with_workers(dataset: Any, size: int | None, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, size, num_workers=workers, multiprocessing_context="fork" if workers else None, **options
    )


@pytest.mark.parametrize("kind", [Numbers, Sized])
@pytest.mark.parametrize("training", [True, False])
def test_each_step_sees_what_one_rank_sees_whatever_the_number_of_ranks(kind: Any, training: bool) -> None:
    for length in (1, 2, 5, 6, 7, 12, 17):
        for size in (1, 2, 3):
            for ranks in (1, 2, 3):
                if training and length < ranks:
                    continue
                dealt = [
                    batches(prepared(DataLoader(kind(length), size), rank, ranks, training=training))
                    for rank in range(ranks)
                ]
                seen = [dealt_back([part[step] for part in dealt if step < len(part)]) for step in range(len(dealt[0]))]
                kept = length - length % ranks if training else length
                assert seen == [list(range(kept))[at : at + size * ranks] for at in range(0, kept, size * ranks)]
                if kind is Sized:
                    loaders = [
                        prepared(DataLoader(kind(length), size), rank, ranks, training=training)
                        for rank in range(ranks)
                    ]
                    assert [loader.length for loader in loaders] == [len(part) for part in dealt]


def test_workers_change_nothing() -> None:
    for kind, length in ((Shuffled, 21), (Sized, 16)):
        for ranks in (1, 2):
            for rank in range(ranks):
                for training in (True, False):
                    alone, shared = (
                        prepared(with_workers(kind(length), 2, workers), rank, ranks, training=training)
                        for workers in (0, 2)
                    )
                    for epoch in (0, 1):
                        assert batches(shared, epoch) == batches(alone, epoch), (kind, length, rank, ranks)


def test_eight_items_on_two_ranks_with_two_workers_are_seen_once_each() -> None:
    for size in (1, 2, 3, None):
        seen: list[int] = []
        for rank in range(2):
            for batch in batches(prepared(with_workers(Numbers(8), size, 2), rank, 2, training=False)):
                seen += batch if isinstance(batch, list) else [batch]
        assert sorted(seen) == list(range(8))


def test_workers_that_outlive_an_epoch_learn_the_next_one() -> None:
    lasting = prepared(with_workers(Shuffled(12), 2, 2, persistent_workers=True), 0, 2)
    anew = prepared(with_workers(Shuffled(12), 2, 0), 0, 2)
    epochs = [batches(lasting, epoch) for epoch in (0, 1, 5)]
    assert epochs == [batches(anew, epoch) for epoch in (0, 1, 5)]
    assert epochs[0] != epochs[1]


def test_a_stream_that_shuffles_gives_all_ranks_one_order_and_leaves_their_random_numbers_alone() -> None:
    def order(ranks: int, epoch: int, seed: int = 0) -> list[Any]:
        read: list[list[Any]] = []
        for rank in range(ranks):
            torch.manual_seed(rank)
            random.seed(rank)
            before = rng_state()
            # Each item is a pair; a batch of pairs is collated into two columns.
            found = batches(prepared(DataLoader(Shuffled(18), 3), rank, ranks, seed=seed), epoch)
            read.append([pair for first, second in found for pair in zip(first, second, strict=True)])
            assert torch.equal(before["torch"], rng_state()["torch"])
            assert before["python"] == rng_state()["python"]
        return dealt_back(read)

    assert sorted(item for item, _ in order(1, 0)) == list(range(18))
    assert order(1, 0) == order(2, 0) == order(3, 0)
    assert order(2, 1) != order(2, 0) != order(2, 0, seed=1)


def test_a_stream_that_divides_itself_among_workers_is_dealt_to_the_ranks_only() -> None:
    for workers in (0, 2):
        for ranks in (1, 2, 3):
            seen: list[int] = []
            for rank in range(ranks):
                loader = prepared(with_workers(DividedByWorkers(23), 2, workers), rank, ranks, training=False)
                assert loader.seeks is (workers < 2)
                seen += [item for batch in batches(loader) for item in batch]
            assert sorted(seen) == list(range(23)), (workers, ranks)


def test_a_worker_init_function_that_divides_the_stream_is_refused() -> None:
    def divide(worker: int) -> None:
        get_worker_info().dataset.length = worker  # pyright: ignore

    with pytest.raises(ValueError, match="worker_init_fn asks which worker it runs in"):
        prepared(with_workers(Numbers(8), 2, 2, worker_init_fn=divide), 0, 2)


def test_streams_that_deal_themselves_are_taken_as_they_are() -> None:
    class Split(Numbers):
        _distributed = "rank 1 of 2"  # as datasets.distributed.split_dataset_by_node leaves it

    class Streaming(Numbers):
        __module__ = "litdata.streaming"

    for dataset in (Split(6), Streaming(6)):
        loader = DataLoader(dataset, 2)
        kept = prepared(loader, 1, 2)
        assert kept.loader is loader
        assert not kept.remarks()
    plain = DataLoader(Numbers(6), 2)
    assert prepared(plain, 1, 2, enabled=False).loader is plain


def test_what_is_left_of_a_stream_is_the_tail_of_the_whole_on_any_number_of_ranks() -> None:
    from samestep.trainer.data.prepared import Place

    for kind in (Numbers, Shuffled):
        whole = [batches(prepared(DataLoader(kind(24), 2), rank, 3)) for rank in range(3)]
        for done in range(5):
            again = prepared(DataLoader(kind(24), 2), 1, 3)
            assert batches(again, 0, done) == whole[1][done:]
            assert again.items_done(done) == 6 * done
            other = prepared(DataLoader(kind(24), 3), 0, 2)
            other.begin_at(Place(0, done, 6 * done))
            one = prepared(DataLoader(kind(24), 6), 0, 1)
            rest = batches(one, 0, done)
            first = [batch[0] if kind is Shuffled else batch for batch in batches(other, 0, done)]
            assert first == [(batch[0] if kind is Shuffled else batch)[::2] for batch in rest]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_with_a_state_goes_on_without_reading_again(ranks: int) -> None:
    for done in range(1, 6):
        first = prepared(DataLoader(Resumable(20), 2), ranks - 1, ranks)
        first.set_epoch(0)
        reading = first.batches()
        whole = batches(prepared(DataLoader(Resumable(20), 2), ranks - 1, ranks))
        for _ in range(done):
            next(reading)
        state = first.state_dict(done)
        data = Resumable(20)
        resumed = prepared(DataLoader(data, 2), ranks - 1, ranks)
        resumed.load_state_dict(state, inside=True)
        assert batches(resumed, 0, done) == whole[done:]
        assert data.reads == 20 - 2 * done * ranks
        assert batches(resumed, 1) == whole


def test_a_state_that_was_read_ahead_is_that_of_the_step_that_is_done() -> None:
    first = prepared(DataLoader(Resumable(20), 2), 0, 1)
    first.read_ahead = 4
    first.set_epoch(0)
    reading = first.batches()
    for _ in range(6):
        next(reading)
    for done in range(2, 6):
        resumed = prepared(DataLoader(Resumable(20), 2), 0, 1)
        resumed.load_state_dict(first.state_dict(done), inside=True)
        assert batches(resumed, 0, done)[0] == [2 * done, 2 * done + 1]


# --- through a run -----------------------------------------------------------------------------


class Watching(ScalarWeight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.tolist()
        return (self.w * batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch.tolist()
        self.log("mean", batch.double().mean())


def train_on_streams(length: int, size: int, workers: int, policy: Any) -> tuple[list[int], list[int], float, float]:
    task = Watching()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, strategy=DDPStrategy(uneven_inputs=policy))
    trainer.fit(task, with_workers(Numbers(length), size, workers), with_workers(Numbers(length), size, workers))
    return task.seen, task.evaluated, trainer.callback_metrics["mean"].item(), task.w.item()


def several_streams(workers: int, policy: Any) -> list[Any]:
    return [train_on_streams(length, size, workers, policy) for length, size in ((8, 1), (11, 2), (3, 2))]


@pytest.mark.parametrize(("workers", "policy"), [(0, None), (2, None), (0, "join")])
def test_training_and_evaluation_see_every_item_of_a_stream_once(workers: int, policy: Any) -> None:
    for (length, size), *ranks in zip(
        ((8, 1), (11, 2), (3, 2)), *run_ranks(several_streams, 2, workers, policy), strict=True
    ):
        seen = sorted(item for rank in ranks for item in rank[0])
        assert seen == list(range(length if policy == "join" else length - length % 2)), (length, size)
        assert sorted(item for rank in ranks for item in rank[1]) == list(range(length))
        assert {rank[2] for rank in ranks} == {(length - 1) / 2}
        assert ranks[0][3] == ranks[1][3]
