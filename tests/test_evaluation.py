"""Validation, test and prediction: each sample once, and the metrics of one process, on any number of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback
from samestep.callbacks.logger import Logger
from samestep.trainer import Task
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryPrecision,
    BinaryRecall,
    BinaryStatScores,
)

SETTINGS = [(samples, size) for samples in (*range(1, 10), 13, 20) for size in range(1, 5)]


def value_of(sample: int) -> float:
    """A number whose sums and means are rounded differently in another order."""
    return math.sin(sample + 1) * 10.0 ** (sample % 7 - 3)


def values(samples: int) -> TensorDataset:
    numbers = torch.arange(samples)
    return TensorDataset(numbers, torch.tensor([value_of(sample) for sample in range(samples)], dtype=torch.float64))


class Measuring(Task):
    """Logs what is known of its samples beforehand, and notes which it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[int] = []
        self.batches: list[tuple[int, int]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        numbers, value = batch
        self.seen += numbers.tolist()
        self.batches.append((dataloader_idx, batch_idx))
        self.log("mean", value.mean())
        self.log("python mean", value.mean().item())
        self.log("whole mean", numbers.sum() // len(numbers))  # an int64 tensor
        self.log("sum", value.sum(), reduce_fx="sum")
        self.log("count", len(numbers), reduce_fx=sum)
        self.log("min", value.min(), reduce_fx="min")
        self.log("max", numbers.max().item(), reduce_fx=torch.max)
        self.log("any", (numbers == 3).any(), reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        numbers, value = batch
        return torch.stack([numbers.double(), 2 * value], dim=1)


def expected(samples: int, size: int, ranks: int) -> dict[str, float]:
    """The metrics of all samples, worked out with exact sums."""
    numbers = range(samples)
    # A mean of batches is weighted by their sizes; a batch's own floored mean depends on who is in it.
    parts = [numbers[rank::ranks][at : at + size] for rank in range(ranks) for at in range(0, samples, size)]
    mean = math.fsum(map(value_of, numbers)) / samples
    return {
        "mean": mean,
        "python mean": mean,
        "whole mean": sum(len(part) * (sum(part) // len(part)) for part in parts if part) / samples,
        "sum": math.fsum(map(value_of, numbers)),
        "count": samples,
        "min": min(map(value_of, numbers)),
        "max": samples - 1,
        "any": float(samples > 3),
    }


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What each rank returns; a single rank is this process."""
    return [function(*args)] if ranks == 1 else run_ranks(function, ranks, *args)


def validate_all() -> list[tuple[list[int], list[tuple[int, int]], dict[str, float]]]:
    outcomes: list[Any] = []
    for samples, size in SETTINGS:
        task = Measuring()
        (result,) = quiet_trainer().validate(task, DataLoader(values(samples), size), verbose=False)
        outcomes.append((task.seen, task.batches, result))
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_sample_is_seen_once_and_the_metrics_are_those_of_one_process(ranks: int) -> None:
    outcomes = on_ranks(validate_all, ranks)
    for index, (samples, size) in enumerate(SETTINGS):
        of_ranks = [outcome[index] for outcome in outcomes]
        for rank, (seen, batches, result) in enumerate(of_ranks):
            assert seen == list(range(rank, samples, ranks)), (samples, size)
            assert batches == [(0, batch) for batch in range(math.ceil(len(seen) / size))]
            assert result == of_ranks[0][2], "the ranks have different metrics"
        assert of_ranks[0][2] == pytest.approx(expected(samples, size, ranks), rel=1e-12, abs=1e-12), (samples, size)


def test_an_empty_loader_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"the validation loader has no batch \(a dataset of 0 samples\)"):
        validate_empty()
    for error in errors_of_ranks(validate_empty, 2):
        assert "the validation loader has no batch when dealt to 2 ranks (a dataset of 0 samples)" in error


def validate_empty() -> None:
    quiet_trainer().validate(Measuring(), DataLoader(values(0), 2), verbose=False)


class Logs(Task):
    """Logs what `step` says of a batch."""

    def __init__(self, step: Callable[[Logs, Any], None], **metrics: Any) -> None:
        super().__init__()
        self.step = step
        self.metrics = nn.ModuleDict(metrics)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self, batch)


def validated(step: Callable[[Logs, Any], None], data: Any, size: int, **metrics: Any) -> dict[str, float]:
    (result,) = quiet_trainer().validate(Logs(step, **metrics), DataLoader(data, size), verbose=False)
    return result


def named_examples() -> list[dict[str, float]]:
    def mean_and_count(task: Logs, batch: Tensor) -> None:
        task.log("mean", batch.mean())
        task.log("n", len(batch), reduce_fx="sum")

    seven = torch.arange(7, dtype=torch.float64)
    losses = torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0])
    whole = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]) > 0.5
    return [
        validated(mean_and_count, seven, 2),
        validated(lambda task, batch: task.log("loss", batch.mean()), losses, 2),
        validated(lambda task, batch: task.log("correct", batch.sum() // len(batch)), whole, 1),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_examples_that_other_trainers_get_wrong(ranks: int) -> None:
    for outcome in on_ranks(named_examples, ranks):
        assert outcome == [{"mean": 3.0, "n": 7.0}, {"loss": 2.0}, {"correct": pytest.approx(0.2, abs=1e-15)}]


NAN, INF = math.nan, math.inf
# The data; its mean and sum; its least; its greatest.
NOT_FINITE = [
    ([1.0, NAN, 2.0], NAN, NAN, NAN), ([NAN, 1.0, 2.0], NAN, NAN, NAN), ([1.0, 2.0, 3.0, NAN], NAN, NAN, NAN),
    ([1.0, INF, 2.0], INF, 1.0, INF), ([1.0, 2.0, -INF], -INF, -INF, 2.0), ([INF, -INF, 0.0], NAN, -INF, INF),
]  # fmt: skip


def not_finite() -> list[dict[str, float]]:
    def all_reductions(task: Logs, batch: Tensor) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            task.log(reduction, getattr(batch, reduction)(), reduce_fx=reduction)
            task.log(f"python {reduction}", getattr(batch, reduction)().item(), reduce_fx=reduction)

    return [validated(all_reductions, torch.tensor(data, dtype=torch.float64), 1) for data, *_ in NOT_FINITE]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_and_infinity_pass_through(ranks: int) -> None:
    for outcome in on_ranks(not_finite, ranks):
        for result, (data, mean, least, greatest) in zip(outcome, NOT_FINITE, strict=True):
            right = {"mean": mean, "sum": mean, "min": least, "max": greatest}
            right |= {f"python {name}": value for name, value in right.items()}
            assert result == pytest.approx(right, nan_ok=True), data


KINDS: list[Callable[[int], Any]] = [
    float, lambda value: torch.tensor(float(value), dtype=torch.float32), torch.tensor, int, np.float64,
    lambda value: torch.tensor([value], dtype=torch.float64),
]  # fmt: skip


def mixed_kinds() -> list[dict[str, float]]:
    """Python numbers and tensors of several types under one name, with each kind as the first."""

    def log_as(task: Logs, batch: Tensor) -> None:
        value = int(batch)
        for reduction in ("mean", "sum", "max"):
            task.log(reduction, KINDS[value % len(KINDS)](value), reduce_fx=reduction)

    return [validated(log_as, torch.arange(2**24 + first, 2**24 + first + 41), 1) for first in range(len(KINDS))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_are_double_precision_whatever_kind_of_number_comes_first(ranks: int) -> None:
    for outcome in on_ranks(mixed_kinds, ranks):
        for first, result in enumerate(outcome):
            numbers = range(2**24 + first, 2**24 + first + 41)
            # 2²⁴+1 is no float32: some of those come rounded; they are summed as they came.
            came = [float(np.float32(number)) if number % len(KINDS) == 1 else number for number in numbers]
            right = {"mean": sum(came) / 41, "sum": sum(came), "max": max(came)}
            assert result == pytest.approx(right, rel=1e-15, abs=0), numbers[0] % len(KINDS)


# --- ranks without a batch -------------------------------------------------------------------


NAME_COUNTS = [2, 31, 32, 100]  # 31 names fit into the first message between the ranks


def validate_one_sample() -> list[dict[str, float]]:
    outcomes: list[dict[str, float]] = []
    for names in NAME_COUNTS:

        def many(task: Logs, batch: Tensor, names: int = names) -> None:
            for number in range(names):
                reduction = ("mean", "sum", "min", "max")[number % 4]
                task.log(f"value {number}", batch.sum() + number, reduce_fx=reduction, prog_bar=number == 1)

        trainer = quiet_trainer()
        (result,) = trainer.validate(Logs(many), DataLoader(torch.tensor([0.5]), 4), verbose=False)
        assert trainer.progress_bar_metrics == {"value 1": 1.5}
        assert {name: value.item() for name, value in trainer.callback_metrics.items()} == result
        outcomes.append(result)
    return outcomes


def test_ranks_without_a_batch_get_the_others_metrics() -> None:
    for outcome in run_ranks(validate_one_sample, 3):
        for names, result in zip(NAME_COUNTS, outcome, strict=True):
            assert result == {f"value {number}": 0.5 + number for number in range(names)}


class LogsAtTheEnds(Task):
    """Logs from a batch, and from hooks of the epoch, which ranks without a batch have, too."""

    def on_validation_epoch_start(self) -> None:
        self.log("start", 3.0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("batch", batch.mean())

    def on_validation_epoch_end(self) -> None:
        self.log("end", 4.0)


class LogsAtTheEnd(LogsAtTheEnds):
    def on_validation_epoch_start(self) -> None: ...


def validate_with_ends(kind: type[Task]) -> dict[str, float]:
    (result,) = quiet_trainer().validate(kind(), DataLoader(torch.tensor([2.0]), 1), verbose=False)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_a_batch_may_log_at_the_end_of_the_epoch(ranks: int) -> None:
    assert on_ranks(validate_with_ends, ranks, LogsAtTheEnd) == [{"batch": 2.0, "end": 4.0}] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_a_batch_may_log_at_the_start_of_the_epoch(ranks: int) -> None:
    assert on_ranks(validate_with_ends, ranks, LogsAtTheEnds) == [{"start": 3.0, "batch": 2.0, "end": 4.0}] * ranks


def validate_own_shares(lengths: list[int]) -> dict[str, float]:
    """Each rank reads its own part of the samples, dealt by the user."""
    rank = torch.distributed.get_rank()
    start = sum(lengths[:rank])
    own = Subset(torch.arange(float(sum(lengths))), range(start, start + lengths[rank]))
    task = Logs(lambda task, batch: task.log("mean", batch.mean()))
    trainer = quiet_trainer(use_distributed_sampler=False)
    (result,) = trainer.validate(task, DataLoader(own, 2), verbose=False)
    return result


@pytest.mark.parametrize("lengths", [[4, 1], [3, 0], [0, 3]])
def test_shares_dealt_by_the_user_may_be_of_any_length(lengths: list[int]) -> None:
    mean = (sum(lengths) - 1) / 2
    assert run_ranks(validate_own_shares, 2, lengths) == [{"mean": mean}] * 2


class OwnStream(IterableDataset[Tensor]):
    """Rank r gives 3·r numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        rank = torch.distributed.get_rank()
        return iter([torch.tensor(float(rank))] * (3 * rank))


def validate_streams() -> dict[str, float]:
    task = Logs(lambda task, batch: task.log("mean", batch.mean()))
    trainer = quiet_trainer(use_distributed_sampler=False)
    (result,) = trainer.validate(task, DataLoader(OwnStream(), 2), verbose=False)
    return result


def test_streams_without_a_length_may_differ_from_rank_to_rank() -> None:
    mean = (3 * 1.0 + 6 * 2.0) / 9
    assert run_ranks(validate_streams, 3) == [{"mean": pytest.approx(mean, abs=1e-15)}] * 3


# --- torchmetrics ------------------------------------------------------------------------------


def classification(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    scores = torch.rand(samples, generator=generator)
    targets = torch.arange(samples) % 2
    return TensorDataset(scores, targets)


class Measured(Task):
    """Updates torchmetrics objects of several kinds of state, and logs them."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.calls = calls
        self.mean_metric, self.sum_metric, self.accuracy = MeanMetric(), SumMetric(), BinaryAccuracy()
        self.collection = MetricCollection(
            {
                "precision": BinaryPrecision(),
                "recall": BinaryRecall(),
                "accuracy": BinaryAccuracy(),
                "sum": SumMetric(),
            },
            prefix="all/",
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, targets = batch
        for metric, arguments in (
            (self.mean_metric, (scores,)), (self.sum_metric, (targets,)), (self.accuracy, (scores, targets)),
        ):  # fmt: skip
            if self.calls:
                metric(*arguments)
            else:
                metric.update(*arguments)
        for name in ("precision", "recall", "accuracy"):
            self.collection[name].update(scores, targets)
        self.collection["sum"].update(scores)
        self.log("mean", self.mean_metric)
        self.log("sum", self.sum_metric)
        self.log("accuracy", self.accuracy)
        self.log_dict(self.collection)


class Grouped(Task):
    """A collection that is updated as a whole: its metrics share their states in groups."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.calls = calls
        self.collection = MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryAccuracy()], prefix="all/")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, targets = batch
        if self.calls:
            self.collection(scores, targets)
        else:
            self.collection.update(scores, targets)
        self.log_dict(self.collection)


class Median(CatMetric):
    """A metric that keeps every sample."""

    def compute(self) -> Tensor:
        return super().compute().median()  # pyright: ignore


class KeepsFloats(Task):
    def __init__(self) -> None:
        super().__init__()
        self.median = Median()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.median.update(batch[0])
        self.log("median", self.median)


class KeepsIntegers(Task):
    """Its metric keeps the targets, too, which are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = BinaryAUROC()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.auroc.update(batch[0], batch[1])
        self.log("auroc", self.auroc)


class KeepsIntegersToTheEnd(KeepsIntegers):
    """Logs its metric when the epoch is over, also on a rank without a batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.auroc.update(batch[0], batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("auroc", self.auroc)


MEASURES: dict[str, Callable[[], Task]] = {
    "updated": Measured, "called": lambda: Measured(calls=True),
    "grouped": Grouped, "grouped and called": lambda: Grouped(calls=True),
    "floats": KeepsFloats, "integers": KeepsIntegers, "integers to the end": KeepsIntegersToTheEnd,
}  # fmt: skip


def measure(kinds: list[str], lengths: list[int]) -> list[list[dict[str, float]]]:
    """For each kind and length, what two validations of one task say."""
    outcomes: list[list[dict[str, float]]] = []
    for kind in kinds:
        for samples in lengths:
            task, trainer = MEASURES[kind](), quiet_trainer()
            twice = [trainer.validate(task, DataLoader(classification(samples), 2), verbose=False) for _ in range(2)]
            outcomes.append([result for results in twice for result in results])
    return outcomes


def measured_by_hand(kind: str, samples: int) -> dict[str, float]:
    scores, targets = classification(samples).tensors
    if kind == "floats":
        return {"median": scores.median().item()}
    if "integers" in kind:
        return {"auroc": BinaryAUROC()(scores, targets).item()}
    counts = {"precision": BinaryPrecision(), "recall": BinaryRecall(), "accuracy": BinaryAccuracy()}
    values = {name: metric(scores, targets).item() for name, metric in counts.items()}
    if "grouped" in kind:
        return {f"all/Binary{name.capitalize()}": value for name, value in values.items()}
    return {
        "mean": scores.mean().item(), "sum": targets.sum().item(), "accuracy": values["accuracy"],
        "all/sum": scores.sum().item(), **{f"all/{name}": value for name, value in values.items()},
    }  # fmt: skip


def assert_measured(ranks: int, kinds: list[str], lengths: list[int]) -> None:
    for outcome in on_ranks(measure, ranks, kinds, lengths):
        cases = [(kind, samples) for kind in kinds for samples in lengths]
        for (kind, samples), results in zip(cases, outcome, strict=True):
            right = pytest.approx(measured_by_hand(kind, samples), rel=1e-5, abs=1e-6)  # torchmetrics sums in float32
            assert results == [right] * 2, (kind, samples)


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchmetrics_are_those_of_one_process(ranks: int) -> None:
    # On three ranks some have no batch of the shortest loaders.
    assert_measured(ranks, ["updated", "called", "grouped", "grouped and called", "floats"], [1, 2, 7])


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchmetrics_that_keep_integers_are_those_of_one_process(ranks: int) -> None:
    assert_measured(ranks, ["integers", "integers to the end"], [6, 7, 13])


@pytest.mark.parametrize("kind", ["integers", "integers to the end"])
def test_torchmetrics_that_keep_integers_take_ranks_without_a_batch(kind: str) -> None:
    assert_measured(3, [kind], [2])


class Twice(Task):
    """Logs one torchmetrics object under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean_metric.update(batch)
        self.log("shown", self.mean_metric, prog_bar=True, logger=False)
        self.log("kept", self.mean_metric)


def validate_twice_named() -> dict[str, float]:
    (result,) = quiet_trainer().validate(Twice(), DataLoader(torch.tensor([1.0, 2.0, 6.0]), 1), verbose=False)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_torchmetrics_object_has_the_same_value_under_two_names(ranks: int) -> None:
    assert on_ranks(validate_twice_named, ranks) == [{"shown": 3.0, "kept": 3.0}] * ranks


class OneMetricForTwoLoaders(Task):
    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        self.mean_metric.update(batch)
        self.log("mean", self.mean_metric)


def test_one_torchmetrics_object_in_two_loaders_is_refused() -> None:
    # It holds the samples of both, so it can't tell a value for each.
    loaders = [DataLoader(torch.tensor([1.0, 3.0]), 1), DataLoader(torch.tensor([5.0]), 1)]
    with pytest.raises(ValueError, match="mean"):
        quiet_trainer().validate(OneMetricForTwoLoaders(), loaders, verbose=False)


class KeepsToItself(Task):
    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric(sync_on_compute=False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.mean_metric.update(batch)
        self.log("own mean", self.mean_metric)
        self.log("mean", batch.mean())


def validate_unsynced_metric() -> tuple[dict[str, float], dict[str, float]]:
    trainer = quiet_trainer()
    (result,) = trainer.validate(KeepsToItself(), DataLoader(torch.tensor([1.0, 3.0]), 1), verbose=False)
    return result, {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_a_torchmetrics_object_that_does_not_synchronize_is_not_there_for_monitors() -> None:
    first, second = run_ranks(validate_unsynced_metric, 2)
    assert (first[0]["own mean"], second[0]["own mean"]) == (1.0, 3.0)
    assert first[1] == second[1] == {"mean": 2.0}


class TrainsAndValidatesWithOne(ScalarWeight):
    """Uses one torchmetrics object in training, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean_metric.update(batch)
        self.log("train/mean", self.mean_metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean_metric.update(batch)
        self.log("val/mean", self.mean_metric)


def test_a_torchmetrics_object_works_in_training_after_a_validation() -> None:
    task, trainer = TrainsAndValidatesWithOne(), quiet_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.validate(task, DataLoader(torch.tensor([1.0, 2.0]), 1), verbose=False)
    trainer.fit(task, DataLoader(torch.tensor([3.0, 6.0]), 1))
    assert trainer.callback_metrics["train/mean"] == 4.5


class PerClass(Task):
    def __init__(self) -> None:
        super().__init__()
        self.scores = BinaryStatScores()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(batch[0], batch[1])
        self.log("scores", self.scores)


def test_a_torchmetrics_object_without_a_scalar_value_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"self\.log\('scores'\): a tensor of shape \[5\], expected a scalar"):
        quiet_trainer().validate(PerClass(), DataLoader(classification(3), 2), verbose=False)


# --- several loaders ---------------------------------------------------------------------------


class Several(Task):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleList([MeanMetric(), MeanMetric()])
        self.seen: list[list[float]] = [[], []]

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        self.seen[dataloader_idx] += batch.tolist()
        self.metrics[dataloader_idx].update(batch)
        self.log("mean", batch.mean())
        self.log("metric", self.metrics[dataloader_idx])
        self.log("joint", batch.mean(), add_dataloader_idx=False)


def validate_several(pairs: list[tuple[int, int]]) -> list[tuple[list[dict[str, float]], list[list[float]]]]:
    outcomes: list[Any] = []
    for first, second in pairs:
        numbers, task = torch.arange(float(first + second)), Several()
        loaders = [DataLoader(numbers[:first], 2), DataLoader(numbers[first:], 2)]
        outcomes.append((quiet_trainer().validate(task, loaders, verbose=False), task.seen))
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("pairs", [[(6, 6), (5, 7)], [(6, 1)], [(1, 6)]], ids=["full", "second empty", "first empty"])
def test_several_loaders_have_metrics_of_their_own(pairs: list[tuple[int, int]], ranks: int) -> None:
    outcomes = on_ranks(validate_several, ranks, pairs)
    for case, (first, second) in enumerate(pairs):
        for index, numbers in enumerate([range(first), range(first, first + second)]):
            assert sorted(value for rank in outcomes for value in rank[case][1][index]) == list(numbers)
        joint = (first + second - 1) / 2
        for rank in outcomes:
            for index, mean in enumerate([(first - 1) / 2, first + (second - 1) / 2]):
                right = {"joint": joint, f"mean/dataloader_idx_{index}": mean, f"metric/dataloader_idx_{index}": mean}
                assert rank[case][0][index] == pytest.approx(right, abs=1e-6)


class TwoWithEnds(LogsAtTheEnds):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        self.log("batch", batch.mean())


def test_what_is_logged_at_the_ends_of_an_epoch_belongs_to_no_loader() -> None:
    loaders = [DataLoader(torch.tensor([1.0]), 1), DataLoader(torch.tensor([5.0]), 1)]
    results = quiet_trainer().validate(TwoWithEnds(), loaders, verbose=False)
    assert results == [
        {"start": 3.0, "end": 4.0, "batch/dataloader_idx_0": 1.0},
        {"start": 3.0, "end": 4.0, "batch/dataloader_idx_1": 5.0},
    ]


def test_a_step_that_takes_no_loader_index_is_named_where_there_are_several() -> None:
    loaders = [DataLoader(torch.tensor([1.0]), 1), DataLoader(torch.tensor([5.0]), 1)]
    task = Logs(lambda task, batch: None)
    with pytest.raises(TypeError, match="dataloader_idx"):
        quiet_trainer().validate(task, loaders, verbose=False)


def test_a_dict_of_loaders_is_refused() -> None:
    loaders = {"first": DataLoader(torch.tensor([1.0]), 1), "second": DataLoader(torch.tensor([5.0]), 1)}
    task = Measuring()
    with pytest.raises(TypeError, match="the validation loaders are a dict"):
        quiet_trainer().validate(task, loaders, verbose=False)
    with pytest.raises(TypeError, match="the prediction loaders are a dict"):
        quiet_trainer().predict(task, loaders)


def test_a_step_that_takes_the_batch_only_is_given_no_more() -> None:
    class Short(Task):
        def validation_step(self, batch: Tensor) -> None:  # pyright: ignore
            self.log("mean", batch.mean())

    (result,) = quiet_trainer().validate(Short(), DataLoader(torch.tensor([1.0, 2.0]), 1), verbose=False)
    assert result == {"mean": 1.5}


# --- inside fit --------------------------------------------------------------------------------


class KeepsMetrics(Callback):
    """Notes the metrics at the end of each validation."""

    monitors = True

    def __init__(self) -> None:
        self.validations: list[dict[str, float]] = []
        self.sanity_checks: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        kept = self.sanity_checks if trainer.sanity_checking else self.validations
        kept.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def fit_and_validate(size: int) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(1)
    task, keeps = Regression(), KeepsMetrics()
    trainer = quiet_trainer(max_epochs=2, precision="64-true", seed=5, callbacks=[keeps])
    trainer.fit(task, loader(24, size, shuffle=True), loader(19, size))
    assert len(keeps.validations) == 2
    (after,) = quiet_trainer(precision="64-true").validate(task, loader(19, size), verbose=False)
    return {"val/loss": keeps.validations[-1]["val/loss"]}, after


def test_the_validation_inside_fit_is_that_of_validate() -> None:
    one = fit_and_validate(6)
    assert one[0] == one[1]
    for inside, after in run_ranks(fit_and_validate, 2, 3):
        assert inside == after == pytest.approx(one[0], rel=1e-12)


class Normalizing(ScalarWeight):
    """Each rank's BatchNorm sees other samples in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * self.norm(batch.unsqueeze(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.norm.running_mean is not None
        self.means.append(self.norm.running_mean.item())
        self.log("val/mean", self.norm(batch.unsqueeze(1)).mean())


def fit_with_batch_norm() -> tuple[list[float], float, float]:
    task, trainer = Normalizing(), quiet_trainer(max_epochs=2, num_sanity_val_steps=0)
    validation = DataLoader(torch.tensor([3.0, 4.0]), 1)
    trainer.fit(task, DataLoader(torch.tensor([1.0, 5.0, 2.0, 8.0]), 2), validation)
    inside = trainer.callback_metrics["val/mean"].item()
    return task.means, inside, quiet_trainer().validate(task, validation, verbose=False)[0]["val/mean"]


def test_the_validation_inside_fit_uses_the_statistics_of_rank_0_on_all_ranks() -> None:
    (first, inside, after), (second, *same) = run_ranks(fit_with_batch_norm, 2)
    # Momentum 0.1, from 0; rank 0 saw 1 and 2 in each epoch.
    assert first[:2] == [pytest.approx(0.15, rel=1e-6), pytest.approx(0.15 * 1.9, rel=1e-6)]
    assert second[:2] == first[:2]
    assert inside == after == same[0] == same[1]


class Modes(ScalarWeight):
    """Three layers, of which the middle one was put in eval mode by the user, and notes of their modes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Dropout(), nn.Dropout(), nn.Dropout()])
        self.noted: dict[str, list[list[bool]]] = {}

    def note(self, where: str) -> None:
        self.noted.setdefault(where, []).append([self.training, *(layer.training for layer in self.layers)])
        assert torch.is_grad_enabled() == (where == "training")
        assert torch.is_inference_mode_enabled() == (where != "training")

    def on_train_epoch_start(self) -> None:
        self.layers[1].eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("predict")


ALL_EVAL, MIDDLE_EVAL = [False] * 4, [True, True, False, True]


def test_each_module_has_after_a_validation_the_mode_it_had_before() -> None:
    task, data = Modes(), DataLoader(torch.ones(6), 1)
    quiet_trainer(max_epochs=2, val_check_interval=2).fit(task, data, data)
    assert task.noted["training"] == [MIDDLE_EVAL] * 12
    assert task.noted["validation"] == [ALL_EVAL] * (2 + 2 * 3 * 6)


def test_each_module_has_after_an_evaluation_the_mode_it_had_before() -> None:
    task, data, trainer = Modes(), DataLoader(torch.ones(2), 1), quiet_trainer()
    task.train()
    task.layers[1].eval()
    trainer.validate(task, data, verbose=False)
    trainer.test(task, data, verbose=False)
    trainer.predict(task, data)
    assert task.noted == {"validation": [ALL_EVAL] * 2, "test": [ALL_EVAL] * 2, "predict": [ALL_EVAL] * 2}
    assert [task.training, *(layer.training for layer in task.layers)] == MIDDLE_EVAL
    assert torch.is_grad_enabled()


class FailsInValidation(Modes):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("no validation today")


def test_an_error_in_a_validation_leaves_the_modes_as_they_were() -> None:
    task, trainer = FailsInValidation(), quiet_trainer()
    with pytest.raises(RuntimeError, match="no validation today"):
        trainer.validate(task, DataLoader(torch.ones(2), 1), verbose=False)
    assert [task.training, *(layer.training for layer in task.layers)] == [True] * 4


class Frozen(ScalarWeight):
    """A part of the model is put in eval mode when it is built, as users do with a frozen backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Dropout(), nn.Dropout()
        self.backbone.eval()
        self.noted: list[tuple[bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.noted.append((self.backbone.training, self.head.training))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_a_part_in_eval_mode_stays_so_in_training() -> None:
    task, data = Frozen(), DataLoader(torch.ones(2), 1)
    quiet_trainer(max_epochs=2).fit(task, data, data)
    assert task.noted == [(False, True)] * 4


def test_without_inference_mode_evaluation_is_under_no_grad() -> None:
    noted: list[tuple[bool, bool]] = []
    task = Logs(lambda task, batch: noted.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
    quiet_trainer(inference_mode=False).validate(task, DataLoader(torch.ones(1)), verbose=False)
    quiet_trainer().validate(task, DataLoader(torch.ones(1)), verbose=False)
    assert noted == [(False, False), (False, True)]


# --- the sanity check --------------------------------------------------------------------------


class Noisy(ScalarWeight):
    """Draws random numbers of all kinds, in training as in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()
        self.drawn: list[float] = []
        self.validated = 0

    def draw(self) -> float:
        return random.random() + float(np.random.rand()) + torch.rand(()).item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(self.draw())
        return (self.w * batch).mean() * self.drawn[-1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.mean_metric.update(batch)
        self.log("val/noise", self.draw())
        self.log("val/mean", self.mean_metric, prog_bar=True)


class Keeping(Logger):
    """Keeps what is logged, in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.lines.append((step, dict(metrics)))


class AtTheStart(Callback):
    """Notes what is known when training starts."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        known = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics, trainer.metric_steps)
        self.known = [dict(metrics) for metrics in known]
        self.known += [task.validated, list(trainer.loggers[0].lines)]


def fit_with_sanity_check(batches: int) -> tuple[list[Any], list[float], Tensor, list[Any]]:
    task, logger, start = Noisy(), Keeping(), AtTheStart()
    trainer = quiet_trainer(
        max_epochs=2, seed=3, num_sanity_val_steps=batches, logger=logger, callbacks=[start], log_every_n_steps=1
    )
    training = DataLoader(torch.arange(1.0, 9.0), 2, shuffle=True)
    trainer.fit(task, training, DataLoader(torch.arange(6.0), 1, shuffle=True))
    return start.known, task.drawn, parameters_of(task), logger.lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sanity_check_leaves_nothing_behind_and_changes_no_random_number(ranks: int) -> None:
    without = on_ranks(fit_with_sanity_check, ranks, 0)
    for batches, validated in ((2, 2), (-1, 6 // ranks)):
        for rank, (known, drawn, parameters, lines) in enumerate(on_ranks(fit_with_sanity_check, ranks, batches)):
            assert known == [{}, {}, {}, {}, validated, []]
            assert drawn == without[rank][1]
            assert torch.equal(parameters, without[rank][2])
            assert lines == without[rank][3]
            assert [step for step, line in lines if "val/mean" in line] == (
                [4 // ranks, 8 // ranks] if rank == 0 else []
            )
            assert all(line["val/mean"] == 2.5 for _, line in lines if "val/mean" in line)


def test_the_sanity_check_finds_a_broken_validation_before_training() -> None:
    class Broken(Noisy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("broken")

    task = Broken()
    with pytest.raises(KeyError, match="broken"):
        quiet_trainer(max_epochs=1).fit(task, DataLoader(torch.ones(2)), DataLoader(torch.ones(2)))
    assert task.drawn == []


# --- test and predict --------------------------------------------------------------------------


def evaluate_and_predict_all() -> list[tuple[dict[str, float], list[int], list[Any]]]:
    outcomes: list[Any] = []
    for samples, size in SETTINGS[::3]:
        task, trainer = Measuring(), quiet_trainer()
        data = DataLoader(values(samples), size)
        (result,) = trainer.test(task, data, verbose=False)
        predictions = trainer.predict(task, data)
        assert predictions is not None
        rows = [row for batch in predictions for row in batch.tolist()]
        outcomes.append((result, task.seen, rows))
    return outcomes


@pytest.mark.parametrize("ranks", [1, 3])
def test_test_and_predict_see_each_sample_once(ranks: int) -> None:
    outcomes = on_ranks(evaluate_and_predict_all, ranks)
    for index, (samples, size) in enumerate(SETTINGS[::3]):
        for rank in range(ranks):
            result, seen, rows = outcomes[rank][index]
            own = range(rank, samples, ranks)
            assert seen == list(own)
            # Predictions are those of all ranks.
            assert rows == [[float(sample), 2 * value_of(sample)] for sample in range(samples)], (samples, size)
            assert result == pytest.approx(expected(samples, size, ranks), rel=1e-12, abs=1e-12)


def predict_several(keep: bool | None) -> Any:
    class Doubling(Task):
        def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> Any:
            return {"index": dataloader_idx, "doubled": (2 * batch).tolist()}

    loaders = [DataLoader(torch.arange(3.0), 2), DataLoader(torch.arange(1.0), 2)]
    return quiet_trainer().predict(Doubling(), loaders, return_predictions=keep, gather=False)


def test_predictions_of_several_loaders_are_lists_of_their_own() -> None:
    first, second = run_ranks(predict_several, 2, None)
    assert first == [[{"index": 0, "doubled": [0.0, 4.0]}], [{"index": 1, "doubled": [0.0]}]]
    assert second == [[{"index": 0, "doubled": [2.0]}], []]
    assert run_ranks(predict_several, 2, False) == [None, None]


def limited(limit: int | float) -> list[int]:
    task = Measuring()
    trainer = quiet_trainer(limit_val_batches=limit, limit_test_batches=limit)
    trainer.validate(task, DataLoader(values(12), 2), verbose=False)
    seen, task.seen = task.seen, []
    trainer.test(task, DataLoader(values(12), 2), verbose=False)
    assert seen == task.seen
    return seen


def test_a_limit_counts_batches_of_each_rank() -> None:
    assert limited(2) == [0, 1, 2, 3]
    assert limited(0.5) == [0, 1, 2, 3, 4, 5]
    assert run_ranks(limited, 2, 1) == [[0, 2], [1, 3]]
    assert run_ranks(limited, 2, 1.0) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


# --- the ranks agree ---------------------------------------------------------------------------


def validate_other_weights() -> tuple[float, dict[str, float]]:
    """Each rank builds other weights, and a BatchNorm that has seen other samples."""
    rank = torch.distributed.get_rank()

    class Other(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
            nn.init.constant_(self.net[1].weight, 1.0 + rank)
            nn.init.zeros_(self.net[1].bias)
            self.net[0].running_mean.fill_(float(rank))

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("mean", self.net(batch.unsqueeze(1)).mean())

    task = Other()
    (result,) = quiet_trainer().validate(task, DataLoader(torch.tensor([1.0, 2.0, 3.0]), 1), verbose=False)
    return task.net[0].running_mean.item(), result


def test_all_ranks_evaluate_the_model_of_rank_0() -> None:
    for mean, result in run_ranks(validate_other_weights, 2):
        assert mean == 0.0
        assert result == {"mean": pytest.approx(2.0, rel=1e-4)}
