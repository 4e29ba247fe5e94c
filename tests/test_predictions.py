"""Predictions: each sample once, in the order of the dataset, returned and written, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import BasePredictionWriter, PredictionWriter, read_predictions
from samestep.trainer import Task
from tasks import ScalarWeight, quiet_trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler


class Pair(NamedTuple):
    number: Tensor
    text: list[str]


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: torch.stack([x, x.square()], dim=1),
    "flat": lambda x: x + 0.5,
    "dict": lambda x: {"number": x, "nested": {"half": x / 2, "texts": [f"<{n}>" for n in x.tolist()]}},
    "tuple": lambda x: (x, x > 3, None),
    "named": lambda x: Pair(x, [str(n) for n in x.tolist()]),
    "texts": lambda x: [f"sample {n:.0f}" for n in x.tolist()],
    "ragged": lambda x: [torch.arange(n) for n in x.tolist()],
    "nothing": lambda x: None,
}  # fmt: skip


class Predicts(Task):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.kind(batch)


def numbers(samples: int) -> Tensor:
    return torch.arange(samples, dtype=torch.float64)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)  # pyright: ignore
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))  # pyright: ignore
    return one == other and type(one) is type(other)


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What each rank returns; a single rank is this process."""
    return [function(*args)] if ranks == 1 else run_ranks(function, ranks, *args)


# --- returned ----------------------------------------------------------------------------------

SIZES = [(samples, size) for samples in range(1, 12) for size in (1, 2, 3, 7)]


def predict_all() -> list[Any]:
    outcomes = [
        quiet_trainer().predict(Predicts(KINDS[kind]), DataLoader(numbers(samples), size))
        for samples, size in SIZES
        for kind in ("dict",)
    ]
    return outcomes + [quiet_trainer().predict(Predicts(kind), DataLoader(numbers(8), 3)) for kind in KINDS.values()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_batches_that_one_rank_would_predict(ranks: int) -> None:
    right = [[KINDS["dict"](part) for part in numbers(samples).split(size)] for samples, size in SIZES]
    right += [[kind(part) for part in numbers(8).split(3)] for kind in KINDS.values()]
    for outcome in on_ranks(predict_all, ranks):
        for mine, theirs in zip(outcome, right, strict=True):
            assert same(mine, theirs), (mine, theirs)


class Backwards(Sampler[int]):
    """An order of the user's own, with a sample that comes twice."""

    def __iter__(self) -> Iterator[int]:
        return iter([6, 5, 4, 5, 2, 1, 0])

    def __len__(self) -> int:
        return 7


class OwnBatches(Sampler[list[int]]):
    """Batches of the user's own, of any size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[4], [0, 1, 2], [6, 5], [3]])

    def __len__(self) -> int:
        return 4


ORDERS: dict[str, tuple[Callable[[], DataLoader[Any]], list[list[int]]]] = {
    "shuffled": (lambda: DataLoader(numbers(7), 3, shuffle=True), [[0, 1, 2], [3, 4, 5], [6]]),
    "sampler": (lambda: DataLoader(numbers(7), 3, sampler=Backwards()), [[6, 5, 4], [5, 2, 1], [0]]),
    "batch sampler": (lambda: DataLoader(numbers(7), batch_sampler=OwnBatches()), [[4], [0, 1, 2], [6, 5], [3]]),
    "workers": (lambda: DataLoader(numbers(7), 2, num_workers=2, multiprocessing_context="fork"), [[0, 1], [2, 3], [4, 5], [6]]),
}  # fmt: skip


def predict_in_orders() -> list[Any]:
    outcomes: list[Any] = []
    for make, _ in ORDERS.values():
        predictions: Any = quiet_trainer().predict(Predicts(lambda x: x), make())
        outcomes.append([batch.tolist() for batch in predictions])
    single: Any = quiet_trainer().predict(Predicts(lambda x: float(x)), DataLoader(numbers(5), batch_size=None))
    several: Any = quiet_trainer().predict(Predicts(lambda x: x), [DataLoader(numbers(3), 2), DataLoader(numbers(1))])
    outcomes += [single, [[batch.tolist() for batch in loader] for loader in several]]
    outcomes.append(quiet_trainer().predict(Predicts(lambda x: x), DataLoader(numbers(5)), return_predictions=False))
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_order_is_that_of_the_loader_and_a_shuffle_is_not_followed(ranks: int) -> None:
    for outcome in on_ranks(predict_in_orders, ranks):
        assert outcome == [
            *(order for _, order in ORDERS.values()),
            [0.0, 1.0, 2.0, 3.0, 4.0], [[[0.0, 1.0], [2.0]], [[0.0]]], None,
        ]  # fmt: skip


def predict_own() -> list[Any]:
    """Without gathering: anything, of this rank."""
    task = Predicts(lambda x: {"sum": float(x.sum())})
    dealt = quiet_trainer().predict(task, DataLoader(numbers(5), 2), gather=False)
    trainer = quiet_trainer(use_distributed_sampler=False)
    return [dealt, trainer.predict(task, DataLoader(numbers(2), 2), gather=False)]


def test_without_gathering_each_rank_keeps_what_it_predicted() -> None:
    first, second = run_ranks(predict_own, 2)
    assert first == [[{"sum": 2.0}, {"sum": 4.0}], [{"sum": 1.0}]]
    assert second == [[{"sum": 4.0}], [{"sum": 1.0}]]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(numbers(4))


def growing(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1 + int(x[0]))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "scalar": (lambda x: x.sum(), r"the prediction of batch 0 has shape []: expected the batch as its first dimension, 2 here"),
    "transposed": (lambda x: {"a": x, "b": torch.ones(5, len(x))}, r"the prediction of batch 0['b'] has shape [5, 2]"),
    "number": (lambda x: float(x.sum()), "the prediction of batch 0 is a float: expected a tensor, a list"),
    "text": (lambda x: "fine", "the prediction of batch 0 is a str: expected a tensor, a list with an item for each"),
    "array": (lambda x: x.numpy(), "the prediction of batch 0 is a ndarray"),
    "list of tensors": (lambda x: [x, x, x], "is a list of 3: expected one item for each of the 2 samples"),
    "shapes": (growing, "which make no tensor: expected the same in each"),
}  # fmt: skip


def predict_what_is_refused() -> list[str]:
    errors: list[str] = []
    for kind, _ in REFUSED.values():
        with pytest.raises((ValueError, TypeError)) as error:
            quiet_trainer().predict(Predicts(kind), DataLoader(numbers(8), 2))
        errors.append(str(error.value))
    for loader, options in (
        (DataLoader(numbers(4), 2, sampler=DistributedSampler(range(4), 2, torch.distributed.get_rank())), {}),  # pyright: ignore
        (DataLoader(Stream(), 2), {"use_distributed_sampler": False}),
        ([numbers(2)], {}),
    ):
        with pytest.raises(ValueError, match="gathers the predictions of all ranks") as error:
            quiet_trainer(**options).predict(Predicts(lambda x: x), loader)
        errors.append(str(error.value))
    return errors


def test_what_can_not_be_put_in_order_is_refused_on_every_rank_at_once() -> None:
    for errors in run_ranks(predict_what_is_refused, 2):
        for error, (_, message) in zip(errors, REFUSED.values(), strict=False):
            assert message in error
            assert error.endswith("Or predict(…, gather=False), which keeps on each rank what predict_step returned.")
    for kind, _ in REFUSED.values():  # on one rank there is nothing to gather
        assert len(quiet_trainer().predict(Predicts(kind), DataLoader(numbers(8), 2)) or ()) == 4


def predict_nothing() -> None:
    quiet_trainer().predict(Predicts(lambda x: x), DataLoader(numbers(0), 2))


def test_an_empty_prediction_loader_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match="the prediction loader has no batch"):
        predict_nothing()
    assert all("the prediction loader has no batch" in error for error in errors_of_ranks(predict_nothing, 2))


# --- written -----------------------------------------------------------------------------------


class Notes(BasePredictionWriter):
    """Notes what it is told to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        task: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert prediction is not None
        self.batches.append((batch_indices, batch.tolist(), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, task: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def note(*loaders: Any, **options: Any) -> Notes:
    notes = Notes()
    given = loaders[0] if len(loaders) == 1 else list(loaders)
    trainer = quiet_trainer(callbacks=[notes], **options)
    trainer.predict(Predicts(lambda x: {"x": x}), given, return_predictions=False)
    assert trainer.batch_indices is None
    return notes


def notes_of_a_rank() -> list[Any]:
    rank = torch.distributed.get_rank()
    dealt = [note(make()).batches for make, _ in ORDERS.values()]
    padded = DistributedSampler(range(5), 2, rank, shuffle=True, seed=3)  # pyright: ignore
    unknown = note(DataLoader(Stream(), 2), use_distributed_sampler=False).batches
    several = note(DataLoader(numbers(3), 2), DataLoader(numbers(1)))
    return [*dealt, note(DataLoader(numbers(5), 2, sampler=padded)).batches, unknown, several.batches, several.epochs]


def test_a_writer_is_told_the_dataset_indices_of_each_batch() -> None:
    for rank, (*dealt, padded, unknown, several, epochs) in enumerate(run_ranks(notes_of_a_rank, 2)):
        for batches in (*dealt, padded):
            # The dataset's item number n is n.
            assert batches == [([int(x) for x in batch], batch, at, 0) for at, (_, batch, _, _) in enumerate(batches)]
        assert [indices for indices, *_ in dealt[1]] == ([[6, 4, 2], [0]] if rank == 0 else [[5, 5, 1]])
        assert [indices for indices, *_ in dealt[2]] == ([[4], [6, 5]] if rank == 0 else [[0, 1, 2], [3]])
        assert sum(len(indices) for indices, *_ in padded) == 3
        assert unknown == [(None, [0.0, 1.0], 0, 0), (None, [2.0, 3.0], 1, 0)]
        if rank == 0:
            assert several == [([0, 2], [0.0, 2.0], 0, 0), ([0], [0.0], 0, 1)]
            (predictions, indices), *others = epochs
            assert indices == [[[0, 2]], [[0]]]
            assert same(predictions, [[{"x": numbers(3)[[0, 2]]}], [{"x": numbers(1)}]])
        else:
            assert several == [([1], [1.0], 0, 0)]
            (predictions, indices), *others = epochs
            assert indices == [[[1]], []], "a loader without a batch on this rank has its place"
            assert same(predictions, [[{"x": numbers(3)[[1]]}], []])
        assert others == []


CASES = [(kind, samples, size) for kind in KINDS for samples, size in ((1, 2), (8, 3))]
INTERVALS = ("batch", "epoch", "batch_and_epoch")


def write_all(folder: str) -> None:
    for kind, samples, size in CASES:
        for interval in INTERVALS if kind == "dict" else INTERVALS[:1]:
            if kind == "named":
                continue
            writer = PredictionWriter(f"{folder}/{kind}-{samples}-{interval}", interval)
            loader = DataLoader(numbers(samples), size, sampler=RandomSampler(range(samples)))
            result = quiet_trainer(callbacks=[writer]).predict(Predicts(KINDS[kind]), loader, return_predictions=False)
            assert result is None
    several = [DataLoader(numbers(5), 2), DataLoader(numbers(3), batch_sampler=BatchSampler(Backwards3(), 2, False))]
    writer = PredictionWriter(f"{folder}/several")
    quiet_trainer(callbacks=[writer]).predict(Predicts(KINDS["flat"]), several, return_predictions=False)
    writer = PredictionWriter(f"{folder}/single", "epoch")
    single = DataLoader(numbers(5), batch_size=None)
    quiet_trainer(callbacks=[writer]).predict(Predicts(lambda x: x * 2), single, return_predictions=False)


class Backwards3(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([2, 1, 0])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_written_is_read_in_the_order_of_the_dataset(ranks: int, tmp_path: Path) -> None:
    on_ranks(write_all, ranks, str(tmp_path))
    for kind, samples, _ in CASES:
        for interval in INTERVALS if kind == "dict" else INTERVALS[:1]:
            if kind == "named":
                continue
            indices, predictions = read_predictions(tmp_path / f"{kind}-{samples}-{interval}")
            assert indices == list(range(samples))
            assert same(predictions, KINDS[kind](numbers(samples))), (kind, interval)
    indices, predictions = read_predictions(tmp_path / "several", 1)
    assert (indices, predictions.tolist()) == ([0, 1, 2], [0.5, 1.5, 2.5])
    with pytest.raises(ValueError, match=r"holds the predictions of 2 loaders: expected dataloader_idx, 0 to 1"):
        read_predictions(tmp_path / "several")
    assert read_predictions(tmp_path / "several", 0)[1].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert read_predictions(tmp_path / "single") == ([0, 1, 2, 3, 4], [0.0, 2.0, 4.0, 6.0, 8.0])
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert all(file.name.startswith(("predictions-rank-", "loader-")) for file in files), "something was left over"
    for file in files:
        torch.load(file, weights_only=True)


def test_a_sample_that_was_predicted_twice_is_read_once(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "twice")
    quiet_trainer(callbacks=[writer]).predict(Predicts(lambda x: x), DataLoader(numbers(7), 3, sampler=Backwards()))
    indices, predictions = read_predictions(tmp_path / "twice")
    assert (indices, predictions.tolist()) == ([0, 1, 2, 4, 5, 6], [0.0, 1.0, 2.0, 4.0, 5.0, 6.0])


def test_a_run_replaces_what_an_earlier_one_wrote_and_nothing_else(tmp_path: Path) -> None:
    foreign = tmp_path / "rank-00000.pt"
    foreign.write_text("a checkpoint's")
    for samples in (9, 4):
        writer = PredictionWriter(tmp_path)
        quiet_trainer(callbacks=[writer]).predict(Predicts(lambda x: x), DataLoader(numbers(samples), 2))
    assert read_predictions(tmp_path)[0] == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("predictions-rank-00000/*.pt"))) == 2
    assert foreign.read_text() == "a checkpoint's"


def test_files_that_are_missing_or_can_not_be_read_are_named(tmp_path: Path) -> None:
    def predict(kind: Callable[[Tensor], Any], loader: Any, **options: Any) -> None:
        writer = PredictionWriter(tmp_path, **options)
        quiet_trainer(callbacks=[writer]).predict(Predicts(kind), loader)

    with pytest.raises(
        FileNotFoundError, match=r"predictions-rank-00000\.pt is not there: expected a file of each rank"
    ):
        read_predictions(tmp_path)
    predict(lambda x: x, DataLoader(numbers(4), 2))
    next(iter(tmp_path.glob("predictions-rank-00000/*"))).unlink()
    with pytest.raises(FileNotFoundError, match=r"loader-0-batch-0000000\d\.pt is not there"):
        read_predictions(tmp_path)
    with pytest.raises(ValueError, match=r"dataloader_idx=1: .* holds those of 0 to 0"):
        read_predictions(tmp_path, 1)
    predict(lambda x: x, [numbers(2)])
    with pytest.raises(ValueError, match=r"the prediction of batch 0 of rank 0 in .* has no indices"):
        read_predictions(tmp_path)
    predict(lambda x: x.sum(), DataLoader(numbers(4), 2))
    with pytest.raises(ValueError, match=r"the prediction of batch 0 of rank 0 has shape \[\]"):
        read_predictions(tmp_path)
    for kind in (lambda x: np.ones(len(x)), KINDS["named"]):
        with pytest.raises(TypeError, match=r"can't be read again without running code: expected tensors"):
            predict(kind, DataLoader(numbers(4), 2))
    with pytest.raises(ValueError, match=r"write_interval='step'\): expected one of 'batch', 'epoch'"):
        predict(lambda x: x, DataLoader(numbers(4), 2), write_interval="step")
    with pytest.raises(ValueError, match=r"PredictionWriter\('batch'\): expected a folder first"):
        PredictionWriter("batch")


def test_a_task_that_can_not_predict_is_told_so() -> None:
    with pytest.raises(TypeError, match="has no predict_step, which predict needs: expected a method of that name"):
        quiet_trainer().predict(ScalarWeight(), DataLoader(numbers(4), 2))


def predict_a_stream() -> None:
    quiet_trainer().predict(Predicts(lambda x: x), DataLoader(Stream(), 2))


def test_predictions_of_a_dealt_stream_are_not_gathered_and_the_error_names_the_stream() -> None:
    for error in errors_of_ranks(predict_a_stream, 2):
        assert "which nobody knows of the stream Stream: expected a dataset with a length" in error
