"""Who sees which sample, on how many ranks, in which epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.trainer.data.prepared import PreparedLoader
from samestep.trainer.data.sampling import SeededOrder, Shard, ShuffledOrder
from samestep.trainer.randomness import rng_state
from simulated_ranks import dealt_back, prepared
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

COUNTS = [(samples, ranks) for samples in range(41) for ranks in range(1, 5)]


def batches(loader: PreparedLoader, epoch: int = 0, skip: int = 0) -> list[Any]:
    """The sample numbers in each batch of an epoch, or in what is left of it."""
    loader.set_epoch(epoch)
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader.batches(skip)]


def samples(loader: PreparedLoader, epoch: int = 0) -> list[int]:
    return [sample for batch in batches(loader, epoch) for sample in batch]


def of_ranks(loader: Any, ranks: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """What each rank reads. The ranks' own random numbers differ, as they do in a run."""
    read: list[list[int]] = []
    for rank in range(ranks):
        seed_all(100 + rank)
        read.append(samples(prepared(loader, rank, ranks, **options), epoch))
    return read


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- shards --------------------------------------------------------------------------------


def test_evaluation_shards_hold_each_item_exactly_once() -> None:
    for items, ranks in COUNTS:
        shards = [Shard(range(items), rank, ranks, even=False) for rank in range(ranks)]
        held = [list(shard) for shard in shards]
        assert dealt_back(held) == list(range(items)), (items, ranks)
        assert [len(shard) for shard in shards] == [len(part) for part in held]
        assert [shard.dropped for shard in shards] == [0] * ranks


def test_training_shards_are_equally_long_and_disjoint_and_leave_out_the_remainder() -> None:
    for items, ranks in COUNTS:
        shards = [Shard(range(items), rank, ranks, even=True) for rank in range(ranks)]
        held = [list(shard) for shard in shards]
        assert [len(part) for part in held] == [items // ranks] * ranks == [len(shard) for shard in shards]
        assert dealt_back(held) == list(range(items - items % ranks)), (items, ranks)
        assert [shard.dropped for shard in shards] == [items % ranks] * ranks


def test_a_shard_starts_behind_the_items_that_were_consumed() -> None:
    for items, ranks in COUNTS:
        for even in (True, False):
            for rank in range(ranks):
                shard = Shard(range(items), rank, ranks, even=even)
                whole = list(shard)
                for done in range(len(whole) + 1):
                    shard.start = done * ranks
                    assert list(shard) == whole[done:]
                    assert len(shard) == len(whole)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_see_in_each_step_what_one_rank_with_their_batch_sees(ranks: int, drop_last: bool, shuffle: bool) -> None:
    for length in range(ranks * 3, 41):
        for size in (1, 2, 3):
            wide = DataLoader(range(length), ranks * size, shuffle=shuffle, drop_last=drop_last)
            narrow = DataLoader(range(length), size, shuffle=shuffle, drop_last=drop_last)
            one = batches(prepared(wide), epoch=3)
            dealt = [batches(prepared(narrow, rank, ranks), epoch=3) for rank in range(ranks)]
            steps = [dealt_back([part[step] for part in dealt]) for step in range(len(dealt[0]))]
            remainder = (
                0 if drop_last else length % ranks
            )  # of the last step, which one rank sees and several leave out
            kept = [sample for batch in one for sample in batch]
            kept = kept[: len(kept) - remainder]
            assert steps == [kept[at : at + ranks * size] for at in range(0, len(kept), ranks * size)]


# --- the order -----------------------------------------------------------------------------


def test_the_shuffled_order_is_a_permutation_that_depends_on_seed_and_epoch_only() -> None:
    def order(length: int, seed: int, epoch: int) -> list[int]:
        shuffled = ShuffledOrder(length, seed)
        shuffled.set_epoch(epoch)
        return list(shuffled)

    for length in range(41):
        assert sorted(order(length, 7, 2)) == list(range(length))
        assert len(ShuffledOrder(length, 7)) == length
    before = rng_state()
    first = order(40, 7, 2)
    assert same_rng(before, rng_state())
    torch.manual_seed(99)
    assert order(40, 7, 2) == first
    different = {tuple(order(40, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(different) == 25, "two of the 25 pairs of seed and epoch have the same order"


def same_rng(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether no generator moved in between."""
    return (
        first["python"] == second["python"]
        and torch.equal(first["torch"], second["torch"])
        and first["numpy"] == second["numpy"]
    )


def test_shuffle_of_the_loader_is_respected() -> None:
    plain, shuffled = DataLoader(range(20), 4), DataLoader(range(20), 4, shuffle=True)
    for training in (True, False):
        assert samples(prepared(plain, training=training)) == list(range(20))
        order = samples(prepared(shuffled, training=training))
        assert order != list(range(20))
        assert sorted(order) == list(range(20))
        assert samples(prepared(shuffled, training=training, shuffle=False)) == list(range(20))
        assert dealt_back(of_ranks(shuffled, 2, training=training)) == order


def test_the_order_changes_with_the_epoch_and_with_the_seed_and_comes_back() -> None:
    loader = DataLoader(range(20), 4, shuffle=True)
    one = prepared(loader, seed=1)
    epochs = [samples(one, epoch) for epoch in range(4)]
    assert len(set(map(tuple, epochs))) == 4
    assert samples(one, 2) == epochs[2]
    assert samples(prepared(loader, seed=2), 2) != epochs[2]
    assert samples(prepared(DataLoader(range(20), 3, shuffle=True), seed=1), 2) == epochs[2], (
        "depends on the batch size"
    )


def test_a_generator_of_the_users_own_stands_for_its_seed() -> None:
    def order(generator_seed: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(generator_seed)
        return samples(prepared(DataLoader(range(20), 4, shuffle=True, generator=generator), seed=seed))

    assert order(3, seed=1) == order(3, seed=2)
    assert order(3, seed=1) != order(4, seed=1)


def shuffled_by_another_generator_on_each_rank(kind: str) -> list[int]:
    generator = torch.Generator().manual_seed(10 + torch.distributed.get_rank())
    sampler: dict[str, Any] = {
        "shuffle": {"shuffle": True},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 24, 24, replacement=False, generator=generator)},
        "subset": {"sampler": SubsetRandomSampler(range(24), generator=generator)},
    }[kind]
    return trained_on(DataLoader(range(24), 2, generator=generator, **sampler), epochs=1)


def trained_on(loader: Any, epochs: int, **options: Any) -> list[int]:
    """The samples of all training batches, in the order they came."""
    seen: list[int] = []

    class Watching(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch.tolist())
            return (self.w * batch).mean()

    quiet_trainer(max_epochs=epochs, **options).fit(Watching(), loader)
    return seen


@pytest.mark.parametrize("kind", ["shuffle", "weighted", "subset"])
def test_generators_that_differ_from_rank_to_rank_give_shards_of_one_order(kind: str) -> None:
    shards = run_ranks(shuffled_by_another_generator_on_each_rank, 2, kind)
    assert sorted(shards[0] + shards[1]) == list(range(24))


# --- samplers of the user's own --------------------------------------------------------------


class NumpyPermutation(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())


class PythonPermutation(NumpyPermutation):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.length), self.length))


class WithoutLength(Sampler[int]):
    """Draws from all three generators, and does not say how often."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(24))
        while left:
            place = random.random() + np.random.rand() + torch.rand(()).item()
            yield left.pop(int(place / 3 * len(left)))


WEIGHTS = [1.0 + number % 5 for number in range(24)]
RANDOM_SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 24, replacement=False),
    "subset": lambda: SubsetRandomSampler(range(24)),
    "part": lambda: RandomSampler(range(24), num_samples=24 - 8),
    "numpy": lambda: NumpyPermutation(24),
    "python": lambda: PythonPermutation(24),
    "without length": WithoutLength,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", RANDOM_SAMPLERS)
def test_a_random_sampler_gives_disjoint_shards_of_one_order(kind: str, ranks: int, training: bool) -> None:
    loader = DataLoader(range(24), 2, sampler=RANDOM_SAMPLERS[kind]())
    orders = [dealt_back(of_ranks(loader, ranks, epoch, training=training)) for epoch in (0, 1, 2, 1)]
    for order in orders:
        assert len(set(order)) == len(order) == (16 if kind == "part" else 24)
    assert orders[1] == orders[3], "not a function of the epoch"
    assert len(set(map(tuple, orders))) == 3, "two epochs have the same order"
    assert dealt_back(of_ranks(loader, ranks, 1, training=training, seed=1)) != orders[1]
    assert dealt_back(of_ranks(loader, 1, 1, training=training)) == orders[1], "depends on the number of ranks"


@pytest.mark.parametrize("kind", RANDOM_SAMPLERS)
def test_a_random_sampler_leaves_the_global_random_numbers_alone(kind: str) -> None:
    seed_all(5)
    before = rng_state()
    order = SeededOrder(RANDOM_SAMPLERS[kind](), seed=1)
    for _ in order:
        assert same_rng(before, rng_state())
    assert same_rng(before, rng_state())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weighted_sampler_with_replacement_draws_the_same_on_all_ranks(ranks: int) -> None:
    def loader() -> Any:
        return DataLoader(range(4), 5, sampler=WeightedRandomSampler([0.0, 1.0, 2.0, 0.0], 40))

    drawn = dealt_back(of_ranks(loader(), ranks))
    assert len(drawn) == 40
    assert set(drawn) == {1, 2}
    assert dealt_back(of_ranks(loader(), 1)) == drawn


@pytest.mark.parametrize("kind", ["weighted", "subset", "replacement", "part"])
def test_the_order_of_a_sampler_with_a_generator_is_a_function_of_the_epoch(kind: str) -> None:
    # A resumed run makes a new sampler, and begins in another epoch than the first.
    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        samplers: dict[str, Sampler[int]] = {
            "weighted": WeightedRandomSampler(WEIGHTS, 24, replacement=False, generator=generator),
            "subset": SubsetRandomSampler(range(24), generator=generator),
            "replacement": RandomSampler(range(24), replacement=True, generator=generator),
            "part": RandomSampler(range(24), num_samples=16, generator=generator),
        }
        return DataLoader(range(24), 2, sampler=samplers[kind])

    uninterrupted = prepared(loader())
    epochs = [samples(uninterrupted, epoch) for epoch in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert samples(prepared(loader()), 2) == epochs[2]
    assert samples(uninterrupted, 2) == epochs[2]


def test_a_sequential_sampler_keeps_its_order_on_two_ranks() -> None:
    loader = DataLoader(range(8), 2, sampler=SequentialSampler(range(8)))
    assert of_ranks(loader, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert of_ranks(loader, 2, training=False) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("training", [True, False])
def test_a_fixed_order_of_the_users_own_is_kept_in_every_epoch(training: bool) -> None:
    order = [9, 2, 7, 7, 0, 4, 1]
    loader = DataLoader(range(10), 2, sampler=order)
    for epoch in (0, 1):
        assert dealt_back(of_ranks(loader, 1, epoch, training=training)) == order
        assert dealt_back(of_ranks(loader, 2, epoch, training=training)) == (order[:6] if training else order)
        assert dealt_back(of_ranks(loader, 3, epoch, training=training)) == (order[:6] if training else order)


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, shuffled by torch's global generator where it is said so."""

    groups = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15])

    def __init__(self, shuffle: bool = False) -> None:
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.groups)).tolist() if self.shuffle else range(len(self.groups))
        return iter([self.groups[index] for index in order])


def batches_of_ranks(loader: Any, ranks: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    read: list[list[list[int]]] = []
    for rank in range(ranks):
        seed_all(100 + rank)
        read.append(batches(prepared(loader, rank, ranks, **options), epoch))
    return read


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_sampler_of_the_users_own_is_dealt_in_whole_batches(ranks: int) -> None:
    loader = DataLoader(range(16), batch_sampler=Buckets())
    groups = list(Buckets.groups)
    assert dealt_back(batches_of_ranks(loader, ranks, training=False)) == groups
    assert dealt_back(batches_of_ranks(loader, ranks)) == groups[: len(groups) - len(groups) % ranks]
    shuffled = DataLoader(range(16), batch_sampler=Buckets(shuffle=True))
    first, second = (dealt_back(batches_of_ranks(shuffled, ranks, epoch, training=False)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(groups)
    assert first != second


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torchs_batch_sampler_is_dealt_sample_by_sample(ranks: int) -> None:
    order = [5, 3, 11, 0, 7, 2, 9, 1, 4, 10, 8, 6]
    loader = DataLoader(range(12), batch_sampler=BatchSampler(order, 2, drop_last=False))
    read = batches_of_ranks(loader, ranks)
    assert {len(batch) for part in read for batch in part} == {2}
    assert dealt_back([[sample for batch in part for sample in batch] for part in read]) == order


class Told(Sampler[int]):
    """Notes the epochs it is told."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        shift = self.epochs[-1] if self.epochs else 0
        return iter([(index + shift) % self.length for index in range(self.length)])


class Pairs(Sampler[list[int]]):
    """A batch sampler around another sampler."""

    def __init__(self, sampler: Iterable[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return (len(self.sampler) + 1) // 2  # pyright: ignore

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return iter([order[at : at + 2] for at in range(0, len(order), 2)])


class ToldData(Dataset[int]):
    """A dataset that notes the epochs it is told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("nesting", ["sampler", "torch's batch sampler", "batch sampler", "two deep", "not dealt"])
def test_the_epoch_reaches_samplers_however_deeply_nested(nesting: str) -> None:
    told, data = Told(6), ToldData()
    options: dict[str, Any] = {
        "sampler": {"sampler": told, "batch_size": 2},
        "torch's batch sampler": {"batch_sampler": BatchSampler(told, 2, False)},
        "batch sampler": {"batch_sampler": Pairs(told)},
        "two deep": {"batch_sampler": Pairs(BatchSampler(told, 1, False))},
        "not dealt": {"sampler": told, "batch_size": 2},
    }[nesting]
    if nesting == "two deep":
        options["collate_fn"] = lambda items: torch.tensor(items)
        data.__class__ = type("Listed", (ToldData,), {"__getitem__": lambda self, index: index[0]})
    loader = prepared(DataLoader(data, **options), enabled=nesting != "not dealt")
    assert [samples(loader, epoch) for epoch in (0, 1, 5)] == [
        [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0], [5, 0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert told.epochs == data.epochs == [0, 1, 5]


def test_fit_tells_the_epoch_to_the_users_sampler() -> None:
    told = Told(4)
    assert trained_on(DataLoader(range(4), 4, sampler=told), epochs=3) == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]
    assert told.epochs == [0, 1, 2]


# --- loaders that are taken as they are -------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_torchs_distributed_sampler_is_kept_and_told_the_epoch(training: bool) -> None:
    for rank in range(2):
        sampler = DistributedSampler(range(10), num_replicas=2, rank=rank, shuffle=True, seed=4)
        for loader in (
            DataLoader(range(10), 2, sampler=sampler),
            DataLoader(range(10), batch_sampler=BatchSampler(sampler, 2, False)),
            DataLoader(range(10), batch_sampler=Pairs(sampler)),
        ):
            kept = prepared(loader, rank, 2, training=training)
            assert kept.loader is loader
            for epoch in (0, 3):
                read = samples(kept, epoch)
                assert sampler.epoch == epoch
                assert read == list(sampler)


def test_without_the_distributed_sampler_loaders_are_kept() -> None:
    loader = DataLoader(range(10), 2, shuffle=True)
    kept = prepared(loader, 1, 2, enabled=False)
    assert kept.loader is loader
    assert sorted(samples(kept)) == list(range(10))
    assert trained_on(DataLoader(range(4), 2), epochs=1, use_distributed_sampler=False) == [0, 1, 2, 3]


def test_a_list_of_batches_is_read_as_it_is() -> None:
    loader = [[0, 1], [2, 3], [4]]
    for rank in range(2):
        assert batches(prepared(loader, rank, 2)) == loader
        assert batches(prepared(loader, rank, 2, limit=2)) == loader[:2]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Fixed(DataLoader[Any]):
    """A loader whose constructor takes no sampler."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length), 2, shuffle=True)


class Explicit(DataLoader[Any]):
    """A loader whose constructor takes what is needed to deal its samples, and nothing more."""

    def __init__(self, dataset: Any, batch_size: int = 1, sampler: Any = None, drop_last: bool = False) -> None:
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last)


class Scaled(DataLoader[Any]):
    """A loader with an argument of its own, which has a default."""

    def __init__(self, dataset: Any, scale: int = 1, **options: Any) -> None:
        self.scale = scale
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        return (self.scale * batch for batch in super().__iter__())


class Named(DataLoader[Any]):
    """A loader with an argument of its own, which must be given."""

    def __init__(self, label: str, dataset: Any, **options: Any) -> None:
        self.label = label
        super().__init__(dataset, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_subclass_of_the_loader_stays_one_and_keeps_its_own_arguments(ranks: int) -> None:
    loader = Scaled(range(8), scale=10, batch_size=2)
    dealt = prepared(loader, 0, ranks)
    assert type(dealt.loader) is Scaled
    assert samples(dealt) == list(range(0, 80, 10 * ranks))
    named = prepared(Named("mine", range(8), batch_size=2), 0, ranks).loader
    assert isinstance(named, Named)
    assert named.label == "mine"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loader", [Explicit(range(8), 2), Fixed(8)], ids=["explicit", "fixed"])
def test_a_subclass_is_dealt_whatever_its_constructor_takes(loader: Any, ranks: int) -> None:
    assert sorted(dealt_back(of_ranks(loader, ranks))) == list(range(8))
    dealt = prepared(loader, 0, ranks)
    assert type(dealt.loader) is type(loader)
    assert batches(dealt, 1) != batches(dealt, 0) or isinstance(loader, Explicit), "not shuffled anew"


def test_the_users_loader_itself_is_left_alone() -> None:
    loader = DataLoader(range(8), 2)
    samples(prepared(loader, 1, 2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- what is kept of the loader, and how it is limited ---------------------------------------


def test_the_options_of_the_loader_are_kept() -> None:
    def collate(items: list[int]) -> torch.Tensor:
        return torch.tensor(items) + 100

    def start(worker: int) -> None:
        pass

    loader = DataLoader(
        range(10), 3, collate_fn=collate, drop_last=True, num_workers=2, worker_init_fn=start, timeout=30,
        prefetch_factor=4, persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip
    dealt: Any = prepared(loader, 0, 2).loader
    for name in (
        "dataset", "batch_size", "collate_fn", "drop_last", "num_workers", "worker_init_fn", "timeout",
        "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory",
    ):  # fmt: skip
        assert getattr(dealt, name) == getattr(loader, name), name
    assert samples(prepared(DataLoader(range(4), 2, collate_fn=collate))) == [100, 101, 102, 103]
    single = prepared(DataLoader(range(5), batch_size=None, shuffle=True), 0, 2)
    assert len(batches(single)) == 2
    assert all(isinstance(sample, int) for sample in batches(single))


def read_with_workers(workers: int, skip: int) -> list[Any]:
    # Forked: by default, workers of a rank of `run_ranks` would each import torch anew.
    context = "fork" if workers else None
    loader = DataLoader(range(17), 2, shuffle=True, num_workers=workers, multiprocessing_context=context)
    rank = torch.distributed.get_rank()
    dealt = prepared(loader, rank, 2, seed=3)
    return [batches(dealt, epoch, skip) for epoch in (0, 1)]


def test_the_order_is_the_same_with_workers() -> None:
    for skip in (0, 3):
        assert run_ranks(read_with_workers, 2, 2, skip) == run_ranks(read_with_workers, 2, 0, skip)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_length_is_the_number_of_batches_and_a_limit_cuts_it(ranks: int) -> None:
    for length in range(ranks, 30):
        for size in (1, 2, 4):
            for training in (True, False):
                loader = DataLoader(range(length), size, shuffle=True)
                for rank in range(ranks):
                    whole = prepared(loader, rank, ranks, training=training)
                    read = batches(whole)
                    assert whole.length == len(read)
                    cut = prepared(loader, rank, ranks, training=training, limit=2)
                    assert batches(cut) == read[:2]
                    assert cut.length == len(read[:2])


def test_a_share_of_an_evaluation_loader_is_the_same_samples_on_any_number_of_ranks() -> None:
    for length in range(3, 20):
        one = samples(prepared(DataLoader(range(length), 2), training=False, limit=0.5))
        two = of_ranks(DataLoader(range(length), 1), 2, training=False, limit=0.5)
        assert sorted(two[0] + two[1]) == one, length


@pytest.mark.parametrize(
    ("loader", "limit", "message"),
    [
        (
            DataLoader(range(40), 2),
            0.01,
            "limit_train_batches=0.01 of 20 training batches is none: expected at least 0.05",
        ),
        (DataLoader(Stream(), 2), 0.5, "limit_train_batches=0.5: the training loader has no length"),
    ],
)
def test_a_share_that_means_nothing_is_refused(loader: Any, limit: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(loader, limit=limit)


# --- what is refused -------------------------------------------------------------------------


def test_a_loader_without_a_batch_is_refused_on_every_rank() -> None:
    empty = DataLoader(range(0), 2)
    small = DataLoader(range(3), 2)
    for rank in range(4):
        for training in (True, False):
            with pytest.raises(ValueError, match=r"has no batch when dealt to 4 ranks \(a dataset of 0 samples\)"):
                prepared(empty, rank, 4, training=training)
        with pytest.raises(ValueError, match=r"has no batch when dealt to 4 ranks \(a dataset of 3 samples\)"):
            prepared(small, rank, 4)
    with pytest.raises(ValueError, match=r"training loader has no batch \(a dataset of 3 samples\), drop_last=True"):
        prepared(DataLoader(range(3), 4, drop_last=True))
    with pytest.raises(ValueError, match="has no batch"):
        prepared([])
    for rank in range(4):  # evaluation takes ranks without a batch
        assert samples(prepared(small, rank, 4, training=False)) == [rank][: 1 if rank < 3 else 0]


def test_an_evaluation_loader_that_drops_the_only_batch_of_every_rank_is_refused() -> None:
    for rank in range(2):
        with pytest.raises(ValueError, match="has no batch"):
            prepared(DataLoader(range(3), 4, drop_last=True), rank, 2, training=False)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([1, 2]), "is an iterator, which is used up after one epoch"),
        ((batch for batch in [1, 2]), "is an iterator, which is used up after one epoch"),
        (iter(DataLoader(range(3))), "is an iterator, which is used up after one epoch"),
        ("data.csv", "is a str: expected a DataLoader or another iterable"),
        (5, "is a int: expected a DataLoader or another iterable"),
    ],
)
def test_what_is_no_loader_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"the training loader {message}"):
        prepared(loader)


class Streamed:
    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return iter([torch.ones(2)] * (5 + rank))


def train_without_length(limit: int | None) -> int:
    return len(trained_on(Streamed(), epochs=1, **({} if limit is None else {"limit_train_batches": limit})))


def test_training_loaders_without_length_end_together() -> None:
    assert run_ranks(train_without_length, 2, None) == [10, 10]
    assert run_ranks(train_without_length, 2, 3) == [6, 6]
    assert train_without_length(3) == 6


def train_on_uneven_lists() -> None:
    rank = torch.distributed.get_rank()
    trained_on([torch.ones(2)] * (3 + rank), epochs=1)


def test_lengths_that_differ_are_named_on_every_rank() -> None:
    for error in errors_of_ranks(train_on_uneven_lists, 2):
        assert "the training loader's length differs (rank 0: 3, rank 1: 4 batches)" in error


def train_on_datasets_of_other_lengths() -> None:
    trained_on(DataLoader(range(8 + torch.distributed.get_rank()), 2, shuffle=True), epochs=1)


def test_datasets_that_differ_from_rank_to_rank_are_refused_on_every_rank() -> None:
    for error in errors_of_ranks(train_on_datasets_of_other_lengths, 2):
        assert "the training dataset differs from rank to rank (rank 0: 8, rank 1: 9 samples)" in error


# --- going on inside an epoch ----------------------------------------------------------------

LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(range(23), 2),
    "shuffled": lambda: DataLoader(range(23), 3, shuffle=True),
    "dropping": lambda: DataLoader(range(23), 4, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(range(24), 3, sampler=WeightedRandomSampler(WEIGHTS, 19)),
    "numpy": lambda: DataLoader(range(23), 3, sampler=NumpyPermutation(23)),
    "without length": lambda: DataLoader(range(24), 3, sampler=WithoutLength()),
    "buckets": lambda: DataLoader(range(16), batch_sampler=Buckets(shuffle=True)),
    "torch's batches": lambda: DataLoader(range(23), batch_sampler=BatchSampler(NumpyPermutation(23), 3, False)),
    "single samples": lambda: DataLoader(range(9), batch_size=None, shuffle=True),
    "list": lambda: [[0, 1], [2], [3, 4], [5]],
    "distributed": lambda: DataLoader(range(23), 3, sampler=DistributedSampler(range(23), 2, 0, seed=1)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_left_of_an_epoch_is_the_tail_of_the_whole(kind: str, ranks: int) -> None:
    for limit in (1.0, 3):
        if kind == "without length" and ranks > 1 and limit == 1.0:
            continue  # the trainer asks for a limit there
        for rank in range(ranks):
            loader = prepared(LOADERS[kind](), rank, ranks, limit=limit)
            epochs = [batches(loader, epoch) for epoch in (0, 1)]
            assert limit == 1.0 or len(epochs[0]) <= 3
            for skip in range(len(epochs[0]) + 1):
                resumed = prepared(LOADERS[kind](), rank, ranks, limit=limit)
                seed_all(skip)
                assert batches(resumed, 0, skip) == epochs[0][skip:], (limit, rank, skip)
                if skip < len(epochs[0]):
                    assert batches(resumed, 1) == epochs[1], "the next epoch is not whole"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["in order", "weighted", "buckets", "single samples", "list"])
def test_the_epoch_after_one_that_was_resumed_at_its_end_is_whole(kind: str, ranks: int) -> None:
    loader, resumed = prepared(LOADERS[kind](), 0, ranks), prepared(LOADERS[kind](), 0, ranks)
    first, second = (batches(loader, epoch) for epoch in (0, 1))
    assert batches(resumed, 0, skip=len(first)) == []
    assert batches(resumed, 1) == second


class Counted(Dataset[int]):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def test_skipped_samples_are_not_read() -> None:
    data = Counted()
    loader = prepared(DataLoader(data, 2, shuffle=True), 1, 2)
    whole = batches(loader)
    data.read.clear()
    assert batches(loader, skip=3) == whole[3:]
    assert data.read == [sample for batch in whole[3:] for sample in batch]


# --- through a run ---------------------------------------------------------------------------


def samples_of_each_step(kind: str, batch_size: int, seed: int | None) -> list[list[int]]:
    """The samples of this rank in each step of two epochs; each rank was seeded otherwise before."""
    torch.manual_seed(50 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
    seen: list[list[int]] = []

    class Watching(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch.tolist())
            return (self.w * batch).mean()

    sampler = {"shuffle": {"shuffle": True}, "weighted": {"sampler": WeightedRandomSampler(WEIGHTS, 24)}}[kind]
    loader = DataLoader(range(24), batch_size, **sampler)
    quiet_trainer(max_epochs=2, seed=seed).fit(Watching(), loader)
    return seen


@pytest.mark.parametrize("kind", ["shuffle", "weighted"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_fit_on_ranks_sees_in_each_step_the_samples_of_one_rank(kind: str, seed: int | None) -> None:
    ranks = run_ranks(samples_of_each_step, 3, kind, 2, seed)
    one = samples_of_each_step(kind, 6, seed)
    assert len(one) == 8
    assert [dealt_back([rank[step] for rank in ranks]) for step in range(8)] == one
    assert one[:4] != one[4:]


# --- one order on all ranks ------------------------------------------------------------------


class OwnNumbers(Sampler[int]):
    """Draws from a generator that nobody seeds alike on the ranks."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        return iter(np.random.default_rng().permutation(24).tolist())


class KeptNumbers(OwnNumbers):
    """Draws from a generator of its own, which is the same on all ranks, and goes on from draw to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        return iter(self.numbers.permutation(24).tolist())


class Validated(ScalarWeight):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", batch.mean())


def read_in_other_orders() -> list[str]:
    rank = torch.distributed.get_rank()
    shuffled = random.Random(rank).sample(range(24), 24)
    data = torch.arange(24.0)
    loaders: list[Any] = [
        DataLoader(data, 2, sampler=OwnNumbers()),
        DataLoader(data, 2, sampler=shuffled),
        DataLoader(data, batch_sampler=[shuffled[:12], shuffled[12:]]),
        DataLoader(data, 2, shuffle=rank == 0),
    ]
    told: list[str] = []
    for loader in loaders:
        for begin in (quiet_trainer(max_epochs=1).fit, quiet_trainer().validate):
            try:
                begin(Validated(), loader)
                told.append("nothing")
            except (RuntimeError, ValueError) as error:
                told.append(str(error))
    return told


def test_orders_that_differ_from_rank_to_rank_are_refused_on_every_rank_before_a_step() -> None:
    every = run_ranks(read_in_other_orders, 2)
    assert every[0] == every[1]
    for name, told in zip(["training", "validation"] * 3, every[0][:6], strict=True):
        assert told.startswith(f"the {name} loader's sampler gives other samples, or another order, on rank 1 than on")
    for name, told in zip(["training", "validation"], every[0][6:], strict=True):
        assert f"the {name} loader's sampler differs from rank to rank (rank 0: RandomSampler, rank 1: Seq" in told


def read_with_a_sampler_that_goes_on() -> tuple[int, list[int]]:
    sampler, seen = KeptNumbers(), list[int]()

    class Seeing(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch.int().tolist())
            return super().training_step(batch, batch_idx)

    quiet_trainer(max_epochs=2).fit(Seeing(), DataLoader(torch.arange(24.0), 2, sampler=sampler))
    return sampler.drawn, seen


def test_comparing_the_orders_draws_nothing_from_a_sampler_that_would_not_be_drawn() -> None:
    numbers = np.random.default_rng(5)
    orders = [number for _ in range(2) for number in numbers.permutation(24).tolist()]
    every = run_ranks(read_with_a_sampler_that_goes_on, 2)
    assert [drawn for drawn, _ in every] == [2, 2]
    assert dealt_back([seen for _, seen in every]) == orders
