"""Evaluation is exact for every number of samples, batch size and number of ranks, in every stage that evaluates.

All cases are loaders of one evaluation, which costs little more than one case does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback
from samestep.trainer import Task
from tasks import ScalarWeight, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision, BinaryRecall

CASES = [(samples, size) for samples in range(1, 41) for size in range(1, 8)]
FEWER = CASES[::5]
Case = tuple[int, int]


def measured(cases: list[Case]) -> dict[int, int]:
    """The loaders for which there are torchmetrics objects, with their numbers of samples: one for each number."""
    return {index: samples for index, (samples, size) in enumerate(cases) if size == 1 + samples % 7}


def value_of(sample: int) -> float:
    """A number whose sums and means are rounded differently in another order."""
    return math.sin(sample + 1) * 10.0 ** (sample % 7 - 3)


def data(samples: int) -> TensorDataset:
    numbers = torch.arange(samples)
    return TensorDataset(numbers, torch.tensor([value_of(sample) for sample in range(samples)], dtype=torch.float64))


class Batches(Metric):
    """Keeps each batch as it came, of which no rank has as many as another; counts them and weighs each."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx=None)
        self.add_state("sizes", default=[], dist_reduce_fx=None)
        self.add_state("largest", default=torch.tensor(-math.inf, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, values: Tensor) -> None:
        self.kept.append(values)  # pyright: ignore
        self.sizes.append(torch.tensor(len(values)))  # pyright: ignore
        self.largest = torch.maximum(self.largest, values.max())  # pyright: ignore

    def compute(self) -> Tensor:
        kept, sizes = list(self.kept), list(self.sizes)  # pyright: ignore
        assert [len(values) for values in kept] == [int(size) for size in sizes], "the states are out of step"
        return torch.cat(kept).sum() + self.largest


class Ends(Metric):
    """Combines its state by a function of its own."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("numbers", default=[], dist_reduce_fx=lambda parts: [torch.cat(parts)])
        self.add_state(
            "powers", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx=lambda states: states.sum(0)
        )

    def update(self, numbers: Tensor) -> None:
        self.numbers.append(numbers)  # pyright: ignore
        self.powers += (2**numbers).sum()  # pyright: ignore

    def compute(self) -> Tensor:
        return torch.cat(list(self.numbers)).max() + self.powers.double()  # pyright: ignore


class Median(CatMetric):
    def compute(self) -> Tensor:
        return super().compute().sort().values[0]  # pyright: ignore


def metrics_of(samples: int) -> nn.ModuleDict:
    metrics: dict[str, nn.Module] = {
        "mean": MeanMetric(), "sum": SumMetric(), "least": MinMetric(), "accuracy": BinaryAccuracy(), "first": Median(),
        "batches": Batches(), "ends": Ends(),
        "group": MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryAccuracy()]),
    }  # fmt: skip
    if samples > 1:  # one class alone has no area
        metrics["auroc"] = BinaryAUROC()
    return nn.ModuleDict(metrics)


def scores_and_targets(numbers: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.sin(numbers.double() * 7) + 1) / 2, numbers % 2


def update(metrics: nn.ModuleDict, numbers: Tensor, values: Tensor) -> None:
    for name, metric in metrics.items():
        if name in ("accuracy", "group", "auroc"):
            metric.update(*scores_and_targets(numbers))  # pyright: ignore
        else:
            metric.update(numbers if name == "ends" else values)  # pyright: ignore


def in_float64(metrics: nn.Module) -> None:
    for metric in metrics.modules():
        if isinstance(metric, Metric):
            metric.set_dtype(torch.float64)


class Everything(ScalarWeight):
    """Logs what is known beforehand, and notes what it sees."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases = cases
        self.measures = nn.ModuleDict({str(index): metrics_of(samples) for index, samples in measured(cases).items()})
        self.forget()

    def forget(self) -> None:
        self.seen: list[list[int]] = [[] for _ in self.cases]

    def on_validation_start(self) -> None:
        in_float64(self.measures)  # not before: moving to a device makes torchmetrics forget it

    on_test_start = on_validation_start

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        numbers, values = batch
        self.seen[dataloader_idx] += numbers.tolist()
        self.log("mean", values.mean())
        self.log("python mean", values.mean().item())
        self.log("sum", values.sum(), reduce_fx="sum")
        self.log("count", len(numbers), reduce_fx="sum")
        self.log("min", values.min(), reduce_fx="min")
        self.log("max", numbers.max(), reduce_fx="max")
        if str(dataloader_idx) in self.measures:
            metrics: Any = self.measures[str(dataloader_idx)]
            update(metrics, numbers, values)
            for name, metric in metrics.items():
                if isinstance(metric, MetricCollection):
                    self.log_dict(metric)
                else:
                    self.log(f"metric {name}", metric)

    test_step = validation_step


def right(cases: list[Case]) -> dict[str, float]:
    """All metrics of one process that sees each loader's samples as one batch, with exact sums."""
    every: dict[str, float] = {}
    for index, (samples, _) in enumerate(cases):
        values = [value_of(sample) for sample in range(samples)]
        mean = math.fsum(values) / samples
        plain = {
            "mean": mean, "python mean": mean, "sum": math.fsum(values), "count": samples, "min": min(values),
            "max": samples - 1,
        }  # fmt: skip
        if index in measured(cases):
            metrics = metrics_of(samples)
            in_float64(metrics)
            update(metrics, *data(samples).tensors)
            for name, metric in metrics.items():
                value: Any = metric.compute()  # pyright: ignore
                plain |= value if isinstance(value, dict) else {f"metric {name}": value}
        every |= {f"{name}/dataloader_idx_{index}": float(value) for name, value in plain.items()}
    return every


class KeepsMetrics(Callback):
    """Notes what is seen and known at the end of each validation, also of the sanity check, which publishes nothing."""

    monitors = True

    def __init__(self) -> None:
        self.noted: list[tuple[bool, list[list[int]], dict[str, float]]] = []

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where this rank had no batch, compute says so and gives what is known
            measured = {
                f"metric {name}/dataloader_idx_{index}": float(metric.compute())
                for index, metrics in task.measures.items()
                for name, metric in metrics.items()
                if name != "group"
            }
        known = {name: value.item() for name, value in trainer.callback_metrics.items() if "dataloader" in name}
        self.noted.append((trainer.sanity_checking, task.seen, known if known else measured))
        task.forget()


Outcome = tuple[list[list[int]], dict[str, float]]


def loaders_of(cases: list[Case]) -> list[DataLoader[Any]]:
    return [DataLoader(data(samples), size) for samples, size in cases]


def evaluate() -> list[Outcome]:
    """Validate all, and of fewer cases test, the sanity check of a fit, and the validation in it."""
    outcomes: list[Outcome] = []
    for cases, run in ((CASES, quiet_trainer().validate), (FEWER, quiet_trainer().test)):
        task = Everything(cases)
        results = run(task, loaders_of(cases), verbose=False)
        outcomes.append((task.seen, {name: value for result in results for name, value in result.items()}))
    task, keeps = Everything(FEWER), KeepsMetrics()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=-1, callbacks=[keeps])
    trainer.fit(task, DataLoader(torch.ones(trainer.world_size), 1), loaders_of(FEWER))
    assert [sanity for sanity, *_ in keeps.noted] == [True, False]
    return [*outcomes, *((seen, known) for _, seen, known in keeps.noted)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_counts_once_whatever_the_numbers(ranks: int) -> None:
    every = [evaluate()] if ranks == 1 else run_ranks(evaluate, ranks, timeout=280)
    for stage, cases in enumerate((CASES, FEWER, FEWER, FEWER)):
        outcomes, wanted = [outcome[stage] for outcome in every], right(cases)
        if stage == 2:  # the sanity check publishes nothing; its torchmetrics objects were read
            wanted = {name: value for name, value in wanted.items() if name.startswith("metric ")}
        for index, (samples, _) in enumerate(cases):
            for rank, (seen, _) in enumerate(outcomes):
                assert seen[index] == list(range(rank, samples, ranks))
        for _, known in outcomes:
            assert known == outcomes[0][1], "the ranks have different metrics"
        assert outcomes[0][1] == pytest.approx(wanted, rel=1e-12, abs=1e-12), stage


def collectives_of_torchmetrics() -> dict[str, int]:
    trainer = quiet_trainer()
    trainer.validate(Everything(FEWER), loaders_of(FEWER), verbose=False)
    counts: Any = trainer.strategy.collectives  # pyright: ignore
    return {name: count for name, count in counts.items() if "metric" in name or "names" in name}


def test_all_torchmetrics_objects_take_one_message() -> None:
    # Of the third rank's loaders some are empty, so it is told the names of the others.
    assert run_ranks(collectives_of_torchmetrics, 3, timeout=110)[0] == {
        "metrics of the epoch": 1, "names of the epoch": 1, "states of torchmetrics": 1
    }  # fmt: skip


class Empty(Everything):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def evaluate_nothing() -> list[str]:
    errors: list[str] = []
    full, empty = DataLoader(data(3), 2), DataLoader(data(0), 2)
    trains = DataLoader(torch.ones(4), 1)
    runs: list[Callable[[Any], Any]] = [
        lambda task: quiet_trainer().validate(task, empty), lambda task: quiet_trainer().test(task, [full, empty]),
        lambda task: quiet_trainer().predict(task, empty), lambda task: quiet_trainer(max_epochs=1).fit(task, trains, empty),
    ]  # fmt: skip
    for run in runs:
        task = Empty([])
        with pytest.raises(ValueError, match="has no batch") as error:
            run(task)
        assert task.seen == []
        errors.append(str(error.value).split(" has no batch")[0])
    return errors


def test_a_loader_without_a_sample_is_refused_in_every_stage_on_every_rank() -> None:
    names = ["the validation loader", "the test loader", "the prediction loader", "the validation loader"]
    assert evaluate_nothing() == names
    assert run_ranks(evaluate_nothing, 2) == [names] * 2


# --- what would not be evaluated ------------------------------------------------------------------


class Yields(Task):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        yield batch

    async def test_step(self, batch: Any, batch_idx: int) -> Any:  # pyright: ignore
        return batch

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        yield batch


def test_a_step_that_is_a_generator_or_a_coroutine_is_refused() -> None:
    loader = DataLoader(torch.ones(2))
    for run, name, kind in (
        (quiet_trainer().validate, "validation_step", "generator"), (quiet_trainer().test, "test_step", "coroutine"),
        (quiet_trainer().predict, "predict_step", "generator"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"Yields\.{name} returned a {kind}, so none of it has run"):
            run(Yields(), loader)


def test_what_is_no_loader_in_a_list_of_loaders_is_named() -> None:
    task = Everything([])
    for wrong, kind in ((5, "int"), (None, "NoneType"), ("data", "str")):
        with pytest.raises(TypeError, match=rf"the validation loader is a {kind}: expected a DataLoader"):
            quiet_trainer().validate(task, [DataLoader(data(2)), wrong])
