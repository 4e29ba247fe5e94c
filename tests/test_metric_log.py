"""`self.log`: values paired by name over the ranks, at the right step, under the right name, and kept no longer."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from samestep.callbacks.logger import Logger
from samestep.trainer import Task
from tasks import ScalarWeight, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision, BinaryRecall


class Keeping(Logger):
    """Keeps what is logged, in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def points(self, name: str) -> list[tuple[int, float]]:
        """Step and value of each point of a name."""
        return [(step, line[name]) for step, line in self.lines if name in line]


class Logs(ScalarWeight):
    """Logs what `step` says of a training batch."""

    def __init__(self, step: Callable[[Any, Tensor, int], None], **metrics: Any) -> None:
        super().__init__(lr=0.0)
        self.step = step
        self.metrics = nn.ModuleDict(metrics)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64) ** 1.5


def fit(task: Task, data: Any, size: int, **options: Any) -> tuple[Keeping, dict[str, float]]:
    """What the loggers and the monitors got."""
    logger = Keeping()
    options = {"max_epochs": 1, "log_every_n_steps": 1, "logger": logger, **options}
    trainer = quiet_trainer(**options)
    trainer.fit(task, DataLoader(data, size))
    return logger, {name: value.item() for name, value in trainer.callback_metrics.items()}


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What each rank returns; a single rank is this process."""
    return [function(*args)] if ranks == 1 else run_ranks(function, ranks, *args)


# --- paired by name ----------------------------------------------------------------------------

MANY = [f"name {number}" for number in range(40)]
NAMES = [MANY[:5], MANY[:31], MANY[:32], MANY]  # 31 names fit into the first message between the ranks


def log_in_own_order(names: list[str]) -> tuple[list[tuple[int, dict[str, float]]], dict[str, float], dict[str, float]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        order = names if rank() == 0 else names[::-1] if rank() == 1 else names[3:] + names[:3]
        for name in order:
            number = names.index(name)
            reduction = ("mean", "sum", "min", "max")[number % 4]
            task.log(name, batch.sum() + number, on_epoch=number % 2 == 0, reduce_fx=reduction)

    task = Logs(step)
    logger, monitored = fit(task, numbers(24), 2)

    def validation_step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        for name in names if rank() != 1 else names[::-1]:
            task.log(name, batch.sum() * names.index(name))

    task.step = validation_step
    (result,) = quiet_trainer().validate(task, DataLoader(numbers(24), 2), verbose=False)
    return logger.lines, monitored, result


def log_all_in_own_order() -> list[Any]:
    return [log_in_own_order(names) for names in NAMES]


def test_another_order_of_the_names_on_another_rank_gives_the_same_values() -> None:
    sums = numbers(24).view(4, 2, 3).sum(1)  # [step, rank], since the samples are dealt in turn
    combine: list[Callable[[Tensor], Tensor]] = [torch.mean, torch.sum, torch.amin, torch.amax]
    for names, first, second, third in zip(NAMES, *run_ranks(log_all_in_own_order, 3), strict=True):
        lines, monitored, result = first
        assert first[1:] == second[1:] == third[1:]
        assert second[0] == third[0] == [], "only rank 0 writes"
        for number, name in enumerate(names):
            reduced, both = combine[number % 4], number % 2 == 0
            key = f"{name}_step" if both else name
            points = [(step, line[key]) for step, line in lines if key in line]
            right = [reduced(sums[step] + number).item() for step in range(4)]
            assert points == [(step + 1, pytest.approx(value, rel=1e-12)) for step, value in enumerate(right)]
            epoch = reduced(sums + number).item() if both else right[-1]
            assert monitored[name] == pytest.approx(epoch, rel=1e-12)
            assert result[name] == pytest.approx(number * sums.mean().item(), rel=1e-12)


# The names that each rank logs; the one that is missing, and the rank that has it not.
UNPAIRED: list[tuple[list[list[str]], str, int]] = [
    ([["a", "b"], ["a"]], "b", 1), ([["a"], ["b", "a"]], "b", 0), ([[], ["a"]], "a", 0),
    ([MANY, MANY[:17] + MANY[18:]], "name 17", 1),
    ([["a", "b"], ["a", "b"], ["b"]], "a", 2), ([["a"], ["a"], ["a", "b"]], "b", 0), ([["a"], [], []], "a", 1),
]  # fmt: skip
PLACES = ("step", "epoch", "evaluation")


def log_unpaired() -> list[str]:
    """The error of each case for so many ranks, at each place."""
    ranks = torch.distributed.get_world_size()
    errors: list[str] = []
    for names_of_ranks, _, _ in UNPAIRED:
        for place in PLACES if len(names_of_ranks) == ranks else ():
            names = names_of_ranks[rank()]
            on_epoch = None if place == "evaluation" else place == "epoch"

            def step(task: Logs, batch: Tensor, _: int, names: list[str] = names, on_epoch: Any = on_epoch) -> None:
                for name in names:
                    task.log(name, batch.sum(), on_epoch=on_epoch)

            try:
                if place == "evaluation":
                    quiet_trainer().validate(Logs(step), DataLoader(numbers(8), 1), verbose=False)
                else:
                    fit(Logs(step), numbers(12), 1, log_every_n_steps=1 if place == "step" else 50)
                errors.append("none")
            except RuntimeError as error:
                errors.append(str(error))
    return errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_name_that_is_not_on_every_rank_is_an_error_on_every_rank(ranks: int) -> None:
    cases = [(name, without, place) for names, name, without in UNPAIRED if len(names) == ranks for place in PLACES]
    for errors in run_ranks(log_unpaired, ranks):
        for (name, without, place), error in zip(cases, errors, strict=True):
            when = "step" if place == "step" else "epoch"
            assert f"metric '{name}' was not logged on rank {without} in this {when}, but on rank" in error, place


def log_by_other_reductions(kind: str) -> None:
    metric = MeanMetric()

    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        if kind == "reduction":
            task.log("a", batch.sum(), reduce_fx="sum" if rank() else "mean")
        elif rank():
            task.metrics["mean"].update(batch)
            task.log("a", task.metrics["mean"])
        else:
            task.log("a", batch.sum())

    quiet_trainer().validate(Logs(step, mean=metric), DataLoader(numbers(4), 1), verbose=False)


@pytest.mark.parametrize(
    ("kind", "theirs"), [("reduction", "reduced by 'sum'"), ("metric", "reduced by 'torchmetrics object metrics.mean'")]
)
def test_a_name_reduced_in_another_way_on_another_rank_is_an_error_on_every_rank(kind: str, theirs: str) -> None:
    for error in errors_of_ranks(log_by_other_reductions, 2, kind):
        assert f"metric 'a' is {theirs} on rank 1, and by 'mean' on rank 0" in error


# --- names and steps ---------------------------------------------------------------------------


def log_at_step_and_epoch() -> tuple[list[tuple[int, dict[str, float]]], dict[str, float], dict[str, float]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("both", batch.mean(), on_step=True, on_epoch=True, prog_bar=True)
        task.log("alone", batch.mean(), prog_bar=True)
        task.log("epoch", batch.mean(), on_step=False, on_epoch=True)
        task.log("hidden", batch.mean(), on_epoch=True, logger=False)

    logger = Keeping()
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=2, logger=logger)
    trainer.fit(Logs(step), DataLoader(numbers(12), 4 // trainer.world_size))
    monitored = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return logger.lines, monitored, trainer.progress_bar_metrics


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_say_whether_a_value_is_of_the_step_or_of_the_epoch(ranks: int) -> None:
    means = numbers(12).view(3, 4).mean(1).tolist()
    mean = numbers(12).mean().item()
    outcomes = on_ranks(log_at_step_and_epoch, ranks)

    def approximately(**values: float) -> Any:
        return pytest.approx(values, rel=1e-12)

    # Steps 2, 4 and 6 are logged; the epochs end with steps 3 and 6.
    assert outcomes[0][0] == [
        (2, approximately(both_step=means[1], alone=means[1])), (3, approximately(both_epoch=mean, epoch=mean)),
        (4, approximately(both_step=means[0], alone=means[0])), (6, approximately(both_step=means[2], alone=means[2])),
        (6, approximately(both_epoch=mean, epoch=mean)),
    ]  # fmt: skip
    for _, monitored, shown in outcomes:
        assert monitored == approximately(
            both=mean, both_step=means[2], both_epoch=mean, alone=means[2], epoch=mean,
            hidden=mean, hidden_step=means[2], hidden_epoch=mean,
        )  # fmt: skip
        assert shown == approximately(both_step=means[2], both_epoch=mean, alone=means[2])


WINDOWS = [1, 2, 3]


def log_in_windows(size: int, samples: int) -> list[tuple[list[tuple[int, float]], list[tuple[int, float]]]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("mean", batch.mean())
        task.log("count", float(len(batch)), reduce_fx="sum")

    loggers = [fit(Logs(step), numbers(samples), size, accumulate_grad_batches=window)[0] for window in WINDOWS]
    return [(logger.points("mean"), logger.points("count")) for logger in loggers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_one_point_the_mean_over_its_window_and_the_ranks(ranks: int) -> None:
    samples = 2 * 17  # the last micro-batch is smaller, and the last window shorter
    outcome = on_ranks(log_in_windows, ranks, 4, samples)[0]
    for window, (means, counts) in zip(WINDOWS, outcome, strict=True):
        step = ranks * window * 4
        parts = [numbers(samples)[at : at + step] for at in range(0, samples, step)]
        assert means == [(at + 1, pytest.approx(part.mean().item(), rel=1e-12)) for at, part in enumerate(parts)]
        assert counts == [(at + 1, len(part)) for at, part in enumerate(parts)]


def test_a_name_logged_in_some_micro_batches_only_is_their_mean() -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 2:
            task.log("odd", batch.mean(), on_epoch=True)

    logger, monitored = fit(Logs(step), numbers(8), 1, accumulate_grad_batches=4)
    first, second = numbers(8)[[1, 3]].mean().item(), numbers(8)[[5, 7]].mean().item()
    assert logger.points("odd_step") == [(1, pytest.approx(first)), (2, pytest.approx(second))]
    assert monitored["odd_epoch"] == pytest.approx((first + second) / 2)


class LogsFromHooks(Logs):
    """Logs from everywhere in an epoch."""

    def on_train_start(self) -> None:
        self.log("train start", 5.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch start", 1.0 + self.current_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch start", float(batch_idx))

    def on_after_backward(self) -> None:
        self.log("after backward", 2.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch end", outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", 3.0 + self.current_epoch)


def log_from_hooks() -> list[dict[str, list[tuple[int, float]]]]:
    names = ("train start", "epoch start", "batch start", "after backward", "batch end", "epoch end")
    logger, monitored = fit(LogsFromHooks(lambda *_: None), torch.ones(4), 1, max_epochs=2)
    assert set(monitored) == set(names)
    return [{name: logger.points(name) for name in names}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_of_a_batch_log_at_steps_and_others_at_the_epochs_end(ranks: int) -> None:
    steps = 4 // ranks
    each = [(epoch * steps + batch + 1, batch) for epoch in range(2) for batch in range(steps)]
    assert on_ranks(log_from_hooks, ranks)[0] == [
        {
            "train start": [(steps, 5.0)],
            "epoch start": [(steps, 1.0), (2 * steps, 2.0)],
            "batch start": [(step, float(batch)) for step, batch in each],
            "after backward": [(step, 2.0) for step, _ in each],
            "batch end": [(step, 1.0) for step, _ in each],
            "epoch end": [(steps, 3.0), (2 * steps, 4.0)],
        }
    ]


class ReadsAtTheEnd(Logs):
    """At an epoch's end its metrics can be read, and the torchmetrics objects still hold their states."""

    def __init__(self, *arguments: Any, **metrics: Any) -> None:
        super().__init__(*arguments, **metrics)
        self.read: list[tuple[float, float]] = []

    def read_metrics(self) -> None:
        mean = float(self.trainer.callback_metrics["mean"])
        self.read.append((mean, float(self.metrics["mean"].compute())))
        self.log("twice", 2 * mean)

    def on_train_epoch_end(self) -> None:
        self.read_metrics()

    def on_validation_epoch_end(self) -> None:
        self.read_metrics()


def read_at_the_end() -> tuple[list[tuple[float, float]], float, list[tuple[float, float]], dict[str, float]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.metrics["mean"].update(batch)
        task.log("mean", task.metrics["mean"], on_step=False, on_epoch=True)

    task = ReadsAtTheEnd(step, mean=MeanMetric())
    _, monitored = fit(task, torch.tensor([1.0, 2.0, 6.0, 7.0]), 1, max_epochs=2)
    read, task.read = task.read, []
    (result,) = quiet_trainer().validate(task, DataLoader(torch.tensor([3.0, 5.0]), 1), verbose=False)
    return read, monitored["twice"], task.read, result


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_of_an_epoch_can_be_read_at_its_end(ranks: int) -> None:
    for outcome in on_ranks(read_at_the_end, ranks):
        assert outcome == ([(4.0, 4.0)] * 2, 8.0, [(4.0, 4.0)], {"mean": 4.0, "twice": 8.0})


def test_a_step_value_logged_between_two_steps_that_log_is_shown_at_the_second() -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        if batch_idx in (1, 2, 5, 10):
            task.log("rare", float(batch_idx))

    logger, _ = fit(Logs(step), torch.ones(16), 1, log_every_n_steps=4)
    assert logger.points("rare") == [(4, 2.0), (8, 5.0), (12, 10.0)]
    # The first epoch ends with step 11; its last value is shown at step 12.
    logger, _ = fit(Logs(step), torch.ones(11), 1, log_every_n_steps=4, max_epochs=2)
    assert logger.points("rare") == [(4, 2.0), (8, 5.0), (12, 10.0), (16, 2.0), (20, 5.0)]


def test_an_explicit_batch_size_is_the_weight() -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("mean", batch.mean(), batch_size=1 + 3 * batch_idx, on_step=False, on_epoch=True)

    assert fit(Logs(step), torch.tensor([2.0, 6.0]), 1)[1]["mean"] == (2 * 1 + 6 * 4) / 5


def log_sums_of_one_rank(every: int) -> list[tuple[int, float]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("mean", batch.mean() * (1 + 2 * rank()), batch_size=1 + 2 * rank())

    return fit(Logs(step), torch.ones(2 * every), 1)[0].points("mean")


def test_step_values_are_weighted_over_the_ranks() -> None:
    assert run_ranks(log_sums_of_one_rank, 2, 2)[0] == [(1, 10 / 4), (2, 10 / 4)]  # (1·1 + 3·3) / (1 + 3)


def test_each_epoch_starts_anew() -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        value = batch.sum() + task.current_epoch
        for reduction in ("mean", "sum", "min", "max"):
            task.log(reduction, value, on_step=False, on_epoch=True, reduce_fx=reduction)
        task.metrics["mean"].update(value)
        task.log("metric", task.metrics["mean"], on_step=False, on_epoch=True)
        if task.current_epoch == 0:
            task.log("once", value, on_step=False, on_epoch=True)

    logger, _ = fit(Logs(step, mean=MeanMetric()), torch.tensor([1.0, 2.0]), 1, max_epochs=2)
    assert logger.lines == [
        (2, {"mean": 1.5, "sum": 3.0, "min": 1.0, "max": 2.0, "metric": 1.5, "once": 1.5}),
        (4, {"mean": 2.5, "sum": 5.0, "min": 2.0, "max": 3.0, "metric": 2.5}),
    ]


@pytest.mark.parametrize("arguments", [{"on_step": False, "on_epoch": True}, {"on_step": True, "on_epoch": True}, {}])
def test_another_epoch_may_log_with_other_arguments(arguments: dict[str, Any]) -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("value", batch.sum() + task.current_epoch, prog_bar=task.current_epoch > 0, **arguments)

    # The first epoch ends with a step that is not logged.
    _, monitored = fit(Logs(step), torch.tensor([1.0, 3.0]), 1, max_epochs=2, log_every_n_steps=4)
    assert monitored["value"] == (3.0 if arguments else 4.0)


def test_a_value_is_what_it_was_when_it_was_logged() -> None:
    class Changing(ScalarWeight):
        """Its weight moves from 1 to 0, −1, …; its buffer counts the batches."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("weight", self.w)
            self.log("count", self.count)
            self.log("largest", self.count, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("sum", self.count, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("mean", self.count, on_step=False, on_epoch=True)
            self.count += 1
            return super().training_step(batch, batch_idx)

    logger, monitored = fit(Changing(), torch.ones(3), 1)
    assert logger.points("weight") == [(1, 1.0), (2, 0.0), (3, -1.0)]
    assert logger.points("count") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert (monitored["sum"], monitored["mean"], monitored["largest"]) == (3.0, 1.0, 2.0)
    logger, monitored = fit(Changing(), torch.ones(1), 1)
    assert (monitored["sum"], monitored["mean"], monitored["largest"]) == (0.0, 0.0, 0.0)


def test_a_loss_may_be_changed_in_place_after_it_was_logged() -> None:
    class Scaled(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.w * batch).mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
            loss *= 100
            return loss

    logger, monitored = fit(Scaled(lr=0.0), torch.ones(1, dtype=torch.float64), 1, precision="64-true")
    assert logger.points("loss_step") == [(1, 1.0)]
    assert (monitored["loss_epoch"], monitored["most"]) == (1.0, 1.0)


def test_numbers_of_all_kinds_can_be_logged() -> None:
    kinds: dict[str, Any] = {
        "float": 2.0, "int": 2, "bool": True, "tensor": torch.tensor(2.0), "one element": torch.tensor([[2.0]]),
        "half": torch.tensor(2.0, dtype=torch.float16), "long": torch.tensor(2), "flag": torch.tensor(True),
        "numpy": np.float32(2.0), "numpy int": np.int64(2), "parameter": nn.Parameter(torch.tensor(2.0)),
    }  # fmt: skip

    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log_dict(kinds, on_step=True, on_epoch=True)

    _, monitored = fit(Logs(step), torch.ones(3), 2, accumulate_grad_batches=2)
    for name in kinds:
        right = 1.0 if name in ("bool", "flag") else 2.0
        assert (monitored[name], monitored[f"{name}_step"], monitored[f"{name}_epoch"]) == (right, right, right), name


# --- torchmetrics in training --------------------------------------------------------------------


def log_metrics_in_training(on_step: bool, on_epoch: bool) -> tuple[Keeping, list[int]]:
    left: list[int] = []

    class Watched(Logs):
        def on_train_epoch_start(self) -> None:
            left.append(len(self.metrics["kept"].value))

    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        for name, metric in task.metrics.items():
            metric(batch)
            if name != "kept" or not on_epoch:
                task.log(name, metric, on_step=on_step, on_epoch=on_epoch)

    task = Watched(step, mean=MeanMetric(), total=SumMetric(), kept=CatMetric())
    logger, _ = fit(task, torch.arange(6.0), 1, max_epochs=3)
    return logger, left


def test_a_torchmetrics_object_logged_at_steps_gives_the_value_of_the_batch() -> None:
    logger, _ = log_metrics_in_training(on_step=True, on_epoch=False)
    assert logger.points("mean") == [(step + 1, step % 6) for step in range(18)]


def test_a_torchmetrics_object_logged_at_steps_only_starts_anew_with_each_epoch() -> None:
    _, left = log_metrics_in_training(on_step=True, on_epoch=False)
    assert left == [0, 0, 0], "it keeps the samples of all epochs"


def metrics_at_steps_and_epochs() -> list[tuple[int, dict[str, float]]]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.metrics["mean"](batch)
        task.log("mean", task.metrics["mean"], on_step=True, on_epoch=True)

    return fit(Logs(step, mean=MeanMetric()), torch.arange(8.0), 4)[0].lines


def test_a_torchmetrics_object_is_logged_at_steps_and_at_the_epochs_end() -> None:
    assert metrics_at_steps_and_epochs() == [
        (1, {"mean_step": 1.5}), (2, {"mean_step": 5.5}), (2, {"mean_epoch": 3.5}),
    ]  # fmt: skip
    # On two ranks the samples of each step are dealt in turn: one step of 8 samples.
    assert run_ranks(metrics_at_steps_and_epochs, 2)[0] == [(1, {"mean_step": 3.5}), (1, {"mean_epoch": 3.5})]


class StepAndEpoch(ScalarWeight):
    """Logs one torchmetrics object at steps, and under another name at the epoch's end: as torchmetrics' guide does."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.mean_metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean_metric(batch)
        self.log("each", self.mean_metric)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", self.mean_metric)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean_metric(batch)
        self.log("running", self.mean_metric)

    def on_validation_epoch_end(self) -> None:
        self.log("end", self.mean_metric)


def log_step_and_epoch() -> tuple[Keeping, dict[str, float]]:
    task = StepAndEpoch()
    logger, _ = fit(task, torch.tensor([1.0, 2.0, 3.0, 6.0]), 1, max_epochs=2)
    (result,) = quiet_trainer().validate(task, DataLoader(torch.tensor([3.0, 5.0]), 1), verbose=False)
    return logger, result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_torchmetrics_object_is_logged_at_steps_under_one_name_and_at_the_end_under_another(ranks: int) -> None:
    logger, result = on_ranks(log_step_and_epoch, ranks)[0]
    steps = [1.0, 2.0, 3.0, 6.0] if ranks == 1 else [1.5, 4.5]
    assert logger.points("each") == [(at + 1, value) for at, value in enumerate(steps * 2)]
    assert logger.points("epoch") == [(len(steps), 3.0), (2 * len(steps), 3.0)]
    assert result == {"running": 4.0, "end": 4.0}


class Grouped(ScalarWeight):
    """Its metrics share their states."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.scores = MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryRecall()], prefix="train/")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores, targets = batch
        self.scores(scores, targets)
        self.log_dict(self.scores, on_step=True, on_epoch=True)
        return super().training_step(scores, batch_idx)


def scores_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(12, generator=generator), torch.randint(2, (12,), generator=generator)


def log_collection() -> list[tuple[int, dict[str, float]]]:
    return fit(Grouped(), TensorDataset(*scores_and_targets()), 4, max_epochs=2)[0].lines


def test_a_collection_of_torchmetrics_is_logged_at_steps_and_at_the_epochs_end() -> None:
    scores, targets = scores_and_targets()
    metrics = [BinaryAccuracy(), BinaryPrecision(), BinaryRecall()]

    def right(where: str, part: slice) -> Any:
        values = {
            f"train/{type(metric).__name__}_{where}": metric(scores[part], targets[part]).item() for metric in metrics
        }
        return pytest.approx(values, rel=1e-6)

    whole = right("epoch", slice(None))
    parts = [right("step", slice(at, at + 4)) for at in (0, 4, 8)]
    assert log_collection() == [
        (1, parts[0]), (2, parts[1]), (3, parts[2]), (3, whole), (4, parts[0]), (5, parts[1]), (6, parts[2]), (6, whole)
    ]  # fmt: skip
    ends = [line for _, line in run_ranks(log_collection, 2)[0] if "train/BinaryRecall_epoch" in line]
    assert ends == [whole, whole]


# --- what is refused -----------------------------------------------------------------------------


def only_updated(task: Logs, batch: Tensor, batch_idx: int) -> None:
    task.metrics["mean"].update(batch)
    task.log("a", task.metrics["mean"])


def changed(first: dict[str, Any], second: dict[str, Any]) -> Callable[[Any, Tensor, int], None]:
    return lambda task, batch, index: task.log("a", 1.0, **(first if index == 0 else second))


REFUSED: dict[str, tuple[Callable[[Any, Tensor, int], None], type[Exception], str]] = {
    "vector": (
        lambda task, batch, _: task.log("a", torch.ones(3)), ValueError,
        r"self\.log\('a'\): a tensor of shape \[3\], expected a scalar",
    ),
    "empty": (lambda task, batch, _: task.log("a", torch.ones(0)), ValueError, r"a tensor of shape \[0\], expected a scalar"),
    "string": (lambda task, batch, _: task.log("a", "high"), TypeError, r"self\.log\('a'\): str is no number"),
    "number as text": (lambda task, batch, _: task.log("a", "0.5"), TypeError, r"self\.log\('a'\): str is no number"),
    "nothing": (lambda task, batch, _: task.log("a", None), TypeError, r"self\.log\('a'\): NoneType is no number"),
    "list": (lambda task, batch, _: task.log("a", [1.0]), TypeError, r"self\.log\('a'\): list is no number.*self\.log_dict"),
    "dict": (lambda task, batch, _: task.log("a", {"b": 1.0}), TypeError, r"self\.log\('a'\): dict is no number"),
    "complex": (lambda task, batch, _: task.log("a", 1j), TypeError, r"self\.log\('a'\): complex is no number"),
    "complex tensor": (
        lambda task, batch, _: task.log("a", torch.tensor(1j)), ValueError, r"self\.log\('a'\): a complex tensor, expected a real"
    ),
    "no batch": (changed({"batch_size": 0}, {}), ValueError, r"self\.log\('a', batch_size=0\): expected a whole number of 1 or"),
    "less than none": (changed({}, {"batch_size": -2}), ValueError, r"batch_size=-2\): expected a whole number of 1 or more"),
    "half a sample": (changed({"batch_size": 0.5}, {}), ValueError, r"batch_size=0\.5\): expected a whole number"),
    "tensor as size": (changed({"batch_size": torch.tensor(2)}, {}), ValueError, r"batch_size=tensor\(2\)\): expected"),
    "true as size": (changed({"batch_size": True}, {}), ValueError, r"batch_size=True\): expected"),
    "name": (lambda task, batch, _: task.log(3, 1.0), TypeError, r"self\.log\(3, …\): expected the name as a string"),
    "on_step": (changed({"on_step": 1}, {}), TypeError, r"self\.log\('a', on_step=1\): expected True or False"),
    "prog_bar": (changed({"prog_bar": "yes"}, {}), TypeError, r"self\.log\('a', prog_bar='yes'\): expected True or False"),
    "sync_dist": (changed({"sync_dist": None}, {}), TypeError, r"self\.log\('a', sync_dist=None\): expected True or False"),
    "changed prog_bar": (
        changed({}, {"prog_bar": True}), ValueError, r"self\.log\('a'\) was called with other arguments before in this epoch"
    ),
    "changed on_epoch": (changed({}, {"on_epoch": True}), ValueError, r"self\.log\('a'\) was called with other arguments"),
    "changed reduce_fx": (changed({}, {"reduce_fx": "sum"}), ValueError, r"self\.log\('a'\) was called with other arguments"),
    "unknown reduce_fx": (
        changed({"reduce_fx": "median"}, {}), ValueError,
        r"self\.log\('a', reduce_fx='median'\): expected one of mean, sum, min, max.*torchmetrics\.Metric",
    ),
    "own reduce_fx": (
        changed({"reduce_fx": torch.median}, {}), ValueError, r"self\.log\('a', reduce_fx=<.*median.*>\): expected one of"
    ),
    "neither": (
        changed({"on_step": False}, {}), ValueError, r"self\.log\('a', on_step=False, on_epoch=False\) would log nothing"
    ),
    "graph": (changed({"enable_graph": True}, {}), ValueError, "enable_graph and sync_dist_group are not supported"),
    "group": (changed({"sync_dist_group": "g"}, {}), ValueError, "enable_graph and sync_dist_group are not supported"),
    "metric elsewhere": (
        lambda task, batch, _: task.log("a", MeanMetric(), on_step=False, on_epoch=True), ValueError,
        r"self\.log\('a'\): the metric is no attribute of the task.*Set it in __init__",
    ),
    "metric only updated": (
        only_updated, ValueError,
        r"self\.log\('a', on_step=True\): the metric has no value of the batch.*on_step=False, on_epoch=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_can_not_be_logged_is_refused_by_name(wrong: str) -> None:
    step, kind, message = REFUSED[wrong]
    with pytest.raises(kind, match=message):
        fit(Logs(step, mean=MeanMetric()), torch.ones(2), 1)


def log_metric_of_one_rank(arguments: dict[str, Any]) -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.metrics["mean"].update(batch)
        task.log("a", task.metrics["mean"], **arguments)

    quiet_trainer().validate(Logs(step, mean=MeanMetric()), DataLoader(torch.ones(2)), verbose=False)


def test_a_torchmetrics_object_of_one_rank_is_refused_on_every_rank() -> None:
    for arguments in OWN:
        for error in errors_of_ranks(log_metric_of_one_rank, 2, arguments):
            assert "self.log('a'): a torchmetrics object reduces itself over the ranks" in error


def test_a_step_value_outside_of_a_training_batch_is_refused() -> None:
    message = r"self\.log\('a', on_step=True\) outside of a training batch.*Use on_epoch=True"
    task = Logs(lambda task, batch, _: task.log("a", 1.0, on_step=True, on_epoch=False))
    with pytest.raises(ValueError, match=message):
        quiet_trainer().validate(task, DataLoader(torch.ones(2)), verbose=False)

    class AtTheEnd(ScalarWeight):
        def on_train_epoch_end(self) -> None:
            self.log("a", 1.0, on_step=True)

    with pytest.raises(ValueError, match=message):
        fit(AtTheEnd(), torch.ones(2), 1)


def validate_with_step_values() -> dict[str, float]:
    task = Logs(lambda task, batch, _: task.log("a", batch.mean(), on_step=True, on_epoch=True))
    (result,) = quiet_trainer().validate(task, DataLoader(torch.tensor([4.0]), 1), verbose=False)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_method_shared_with_validation_logs_its_epoch_there(ranks: int) -> None:
    # On two ranks, one has no batch.
    assert on_ranks(validate_with_step_values, ranks) == [{"a": 4.0, "a_epoch": 4.0}] * ranks


def test_logging_outside_of_a_run_is_refused() -> None:
    task = Logs(lambda *_: None)
    message = r"self\.log\('a'\) where no epoch is running: log from a step, or a hook between"
    with pytest.raises(RuntimeError, match=message):
        task.log("a", 1.0)
    fit(task, torch.ones(2), 1)
    with pytest.raises(RuntimeError, match=message):
        task.log("a", 1.0)
    quiet_trainer().validate(task, DataLoader(torch.ones(2)), verbose=False)
    with pytest.raises(RuntimeError, match=message):
        task.log("a", 1.0)


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_what_is_logged_when_an_evaluation_is_over_is_refused(stage: str) -> None:
    # Its metrics are reduced by then: the value would be lost.
    class AtTheEnd(Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def test_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_validation_end(self) -> None:
            self.log("a", 1.0)

        def on_test_end(self) -> None:
            self.log("a", 1.0)

    run = {"validation": quiet_trainer().validate, "test": quiet_trainer().test}[stage]
    with pytest.raises(RuntimeError, match=rf"self\.log\('a'\).*on_{stage}_epoch_end"):
        run(AtTheEnd(), DataLoader(torch.ones(2)), verbose=False)


def test_a_batch_without_a_size_needs_one_for_a_mean() -> None:
    def step(task: Logs, batch: Any, batch_idx: int) -> None:
        task.log("a", 1.0, batch_size=None if batch == ["x"] else 2)
        task.log("sum", 1.0, reduce_fx="sum")

    task = Logs(step)
    (result,) = quiet_trainer().validate(task, [["y"], ["z"]], verbose=False)
    assert result == {"a": 1.0, "sum": 2.0}
    with pytest.raises(ValueError, match=r"can't tell the batch size: a list.*self\.log\(name, value, batch_size=…\)"):
        quiet_trainer().validate(task, [["x"]], verbose=False)


# --- values of one rank, and monitors --------------------------------------------------------------


OWN: list[dict[str, Any]] = [{"sync_dist": False}, {"rank_zero_only": True}]


def log_own_values() -> list[tuple[list[tuple[int, dict[str, float]]], dict[str, float]]]:
    outcomes: list[Any] = []
    for arguments in OWN:

        def step(task: Logs, batch: Tensor, _: int, arguments: dict[str, Any] = arguments) -> None:
            task.log("own", 10.0 + rank(), on_epoch=True, **arguments)
            task.log("all", float(rank()), on_epoch=True)

        logger, monitored = fit(Logs(step), torch.ones(4), 2)
        outcomes.append((logger.lines, monitored))
    return outcomes


def test_values_of_one_rank_are_logged_by_rank_0_and_never_monitored() -> None:
    for first, second in zip(*run_ranks(log_own_values, 2), strict=True):
        assert first[0] == [
            (1, {"own_step": 10.0, "all_step": 0.5}), (1, {"own_epoch": 10.0, "all_epoch": 0.5})
        ]  # fmt: skip
        assert second[0] == []
        assert first[1] == second[1] == {"all": 0.5, "all_step": 0.5, "all_epoch": 0.5}


def log_on_rank_0_alone() -> list[tuple[list[tuple[int, dict[str, float]]], dict[str, float]]]:
    outcomes: list[Any] = []
    for arguments in OWN:

        def step(task: Logs, batch: Tensor, _: int, arguments: dict[str, Any] = arguments) -> None:
            if rank() == 0:
                task.log("own", 10.0, on_epoch=True, **arguments)
            task.log("all", float(rank()), on_epoch=True)

        lines = fit(Logs(step), torch.ones(4), 2)[0].lines
        (result,) = quiet_trainer().validate(Logs(step), DataLoader(torch.ones(4), 2), verbose=False)
        outcomes.append((lines, result))
    return outcomes


def test_rank_0_may_log_alone_what_is_its_own() -> None:
    for first, second in zip(*run_ranks(log_on_rank_0_alone, 2), strict=True):
        assert first[0] == [
            (1, {"own_step": 10.0, "all_step": 0.5}), (1, {"own_epoch": 10.0, "all_epoch": 0.5})
        ]  # fmt: skip
        assert first[1] == {"own": 10.0, "all": 0.5}
        assert second == ([], {"all": 0.5})


class OwnPlateau(Logs):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=0.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


MONITORS: dict[str, Callable[[], dict[str, Any]]] = {
    "EarlyStopping": lambda: {"callbacks": [EarlyStopping("own")]},
    "ModelCheckpoint": lambda: {"callbacks": [ModelCheckpoint(monitor="own")], "enable_checkpointing": True},
    "ReduceLROnPlateau": dict,
}


def monitor_own_value(monitor: str, arguments: dict[str, Any], folder: str) -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("own", float(rank()), on_step=False, on_epoch=True, **arguments)

    kind = OwnPlateau if monitor == "ReduceLROnPlateau" else Logs
    trainer = quiet_trainer(max_epochs=3, default_root_dir=folder, **MONITORS[monitor]())
    trainer.fit(kind(step), DataLoader(torch.ones(4), 1))


def errors_of_monitors(folder: str) -> list[tuple[str, str]]:
    errors: list[tuple[str, str]] = []
    for monitor in MONITORS:
        for arguments in OWN:
            with pytest.raises(RuntimeError) as error:
                monitor_own_value(monitor, arguments, folder)
            errors.append((monitor, str(error.value)))
        monitor_own_value(monitor, {}, folder)  # reduced over the ranks, it can be monitored
    return errors


def test_a_monitor_of_a_value_of_one_rank_is_an_error_on_every_rank(tmp_path: Any) -> None:
    for errors in run_ranks(errors_of_monitors, 2, str(tmp_path)):
        assert len(errors) == 6
        for monitor, error in errors:
            assert f"{monitor} monitors 'own', which was logged with sync_dist=False or rank_zero_only=True" in error


@pytest.mark.parametrize("monitor", MONITORS)
def test_on_one_rank_there_is_nothing_that_could_differ(monitor: str, tmp_path: Any) -> None:
    for arguments in OWN:
        monitor_own_value(monitor, arguments, str(tmp_path))


# --- what it costs -----------------------------------------------------------------------------


def collectives_of_steps(names: int) -> tuple[int, int, int]:
    """Reductions of step values and of epoch values, and of what did not fit into the first message."""

    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        for number in range(names):
            task.log(f"name {number}", batch.sum(), on_epoch=True)

    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=3)
    trainer.fit(Logs(step), DataLoader(torch.ones(12), 1))
    counts: Any = trainer.strategy.collectives  # pyright: ignore
    more = sum(count for name, count in counts.items() if name.startswith("more metrics"))
    return counts["metrics of the step"], counts["metrics of the epoch"], more


def test_names_are_reduced_together_and_only_at_steps_that_log() -> None:
    assert run_ranks(collectives_of_steps, 2, 31) == [(4, 2, 0)] * 2
    assert run_ranks(collectives_of_steps, 2, 32) == [(4, 2, 6)] * 2


class Releasing(Callback):
    """Notes, after each step, how many of the watched tensors are still alive."""

    def __init__(self) -> None:
        self.watched: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        gc.collect()
        self.alive.append(sum(reference() is not None for reference in self.watched))


@pytest.mark.parametrize("window", [1, 2])
def test_nothing_that_was_logged_keeps_a_graph_alive(window: int) -> None:
    releasing = Releasing()

    class Watched(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            releasing.watched.append(weakref.ref(loss))
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        hidden = batch * 2  # held by the graph of `value`, which has no backward that would free it
        value = (task.w * hidden).sum()
        releasing.watched.append(weakref.ref(hidden))
        assert value.requires_grad
        for reduction in ("mean", "sum", "min", "max"):
            task.log(reduction, value, on_step=True, on_epoch=True, reduce_fx=reduction)
        task.log("shaped", value.reshape(1, 1))

    fit(Watched(step), torch.ones(8), 2, accumulate_grad_batches=window, callbacks=[releasing], log_every_n_steps=4)
    assert len(releasing.watched) == 8
    assert releasing.alive == [0] * (4 // window)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


class Last(CatMetric):
    """Keeps every sample, and gives the last."""

    def compute(self) -> Tensor:
        return super().compute()[-1]  # pyright: ignore


class Counting(Callback):
    """Counts the tensors of the process when an epoch begins, in every tenth."""

    def __init__(self) -> None:
        self.tensors: list[int] = []

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch % 10 == 0:
            self.tensors.append(live_tensors())


def tensors_of_epochs() -> list[int]:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            task.log(reduction, (task.w * batch).sum(), on_step=True, on_epoch=True, reduce_fx=reduction)
        task.metrics["mean"].update(batch)
        task.log("metric", task.metrics["mean"], on_step=False, on_epoch=True)
        task.log("own", batch.sum(), sync_dist=False)

    counting = Counting()
    data = DataLoader(torch.ones(4), 1)

    class Validates(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metrics["kept"].update(batch)
            self.log("kept", self.metrics["kept"])
            self.log("val", batch.sum())

    trainer = quiet_trainer(max_epochs=51, log_every_n_steps=1, callbacks=[counting], logger=Keeping())
    trainer.fit(Validates(step, mean=MeanMetric(), kept=Last()), data, data)
    return counting.tensors


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_number_of_tensors_does_not_grow_from_epoch_to_epoch(ranks: int) -> None:
    for tensors in [tensors_of_epochs()] if ranks == 1 else run_ranks(tensors_of_epochs, ranks, timeout=110):
        assert len(tensors) == 6
        assert len(set(tensors[1:])) == 1, tensors


def test_arguments_may_not_change_inside_an_epoch_for_epoch_values_either() -> None:
    def step(task: Logs, batch: Tensor, batch_idx: int) -> None:
        task.log("value", batch.sum(), on_step=False, on_epoch=True, prog_bar=batch_idx > 0)

    with pytest.raises(ValueError, match="called with other arguments before"):
        fit(Logs(step), torch.tensor([1.0, 3.0]), 1)


# --- one torchmetrics object in training and in validation ---------------------------------------


class Mixes(Logs):
    """Updates one torchmetrics object in training, and in validation, too."""

    def __init__(self, where: str) -> None:
        super().__init__(lambda *_: None, mean=MeanMetric(), other=MeanMetric())
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metrics["mean"].update(batch)
        if self.where != "logged in validation":
            self.log("train/mean", self.metrics["mean"], on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metrics["other" if self.where == "apart" else "mean"].update(batch)
        if self.where != "logged in training":
            self.log("val/mean", self.metrics["other" if self.where == "apart" else "mean"])


def fit_with_validation(where: str, interval: int | None) -> dict[str, float]:
    trainer = quiet_trainer(max_epochs=1, val_check_interval=interval)
    trainer.fit(Mixes(where), DataLoader(torch.tensor([1.0, 3.0, 8.0]), 1), DataLoader(torch.tensor([5.0]), 1))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("interval", [2, None])
def test_one_torchmetrics_object_in_training_and_in_the_validation_inside_it_is_refused(interval: int | None) -> None:
    for where in ("logged in training", "logged in validation", "logged in both"):
        with pytest.raises(ValueError, match=r"the torchmetrics object 'metrics\.mean' holds samples of the running"):
            fit_with_validation(where, interval)
    assert fit_with_validation("apart", interval) == {"train/mean": 4.0, "val/mean": 5.0}


def test_a_complex_loss_is_refused() -> None:
    class Complex(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * batch).mean() * 1j

    with pytest.raises(ValueError, match=r"Complex\.training_step returned a complex loss: expected a real scalar"):
        fit(Complex(), torch.ones(2), 1)


# --- any sequence of calls -----------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[list[tuple[float, int]]], float]] = {
    "mean": lambda pairs: math.fsum(v * n for v, n in pairs) / sum(n for _, n in pairs),
    "sum": lambda pairs: math.fsum(v for v, _ in pairs),
    "min": lambda pairs: min(v for v, _ in pairs),
    "max": lambda pairs: max(v for v, _ in pairs),
}  # fmt: skip
EPOCHS = 2


class Plan:
    """Calls of `self.log`, drawn from a seed: for each step which names, for each micro-batch and rank how often."""

    def __init__(self, seed: int, ranks: int) -> None:
        draw = random.Random(f"{seed} {ranks}")
        self.window, self.every, self.steps = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3)), draw.randint(1, 5)
        self.batch = draw.randint(1, 3)
        places = [(True, False), (False, True), (True, True)]
        self.names = {
            f"name {number}": (draw.choice(list(REDUCTIONS)), *draw.choice(places), draw.random() < 0.3)
            for number in range(draw.randint(1, 5))
        }
        self.calls: dict[tuple[int, int], list[tuple[str, float, int | None]]] = {}
        for step in range(EPOCHS * self.steps):
            names = [name for name in self.names if draw.random() < 0.8]
            for micro in range(step * self.window, (step + 1) * self.window):
                for rank in range(ranks):
                    calls = [name for name in names for _ in range(draw.randint(1, 2))]
                    draw.shuffle(calls)  # each rank in an order of its own
                    self.calls[micro, rank] = [
                        (name, draw.uniform(-5, 5), draw.randint(1, 9) if self.names[name][3] else None)
                        for name in calls
                    ]

    def pairs(self, name: str, micros: range, ranks: int) -> list[tuple[float, int]]:
        """The values of a name in these micro-batches, with their weights."""
        return [
            (value, size or self.batch)
            for micro in micros
            for rank in range(ranks)
            for called, value, size in self.calls[micro, rank]
            if called == name
        ]

    def expected(self, ranks: int) -> list[tuple[int, str, float]]:
        """Each point: step, name, value."""
        points: list[tuple[int, str, float]] = []
        waiting: dict[str, float] = {}
        for step in range(EPOCHS * self.steps):
            for name, (reduction, on_step, on_epoch, _) in self.names.items():
                pairs = self.pairs(name, range(step * self.window, (step + 1) * self.window), ranks)
                if on_step and pairs:
                    waiting[f"{name}_step" if on_epoch else name] = REDUCTIONS[reduction](pairs)
            if (step + 1) % self.every == 0:
                points += [(step + 1, name, value) for name, value in waiting.items()]
                waiting = {}
            if (step + 1) % self.steps == 0:
                micros = range((step + 1 - self.steps) * self.window, (step + 1) * self.window)
                for name, (reduction, on_step, on_epoch, _) in self.names.items():
                    pairs = self.pairs(name, micros, ranks)
                    if on_epoch and pairs:
                        value = REDUCTIONS[reduction](pairs)
                        points.append((step + 1, f"{name}_epoch" if on_step else name, value))
        return points


def log_planned(seeds: int, ranks: int) -> list[list[tuple[int, str, float]]]:
    outcomes: list[list[tuple[int, str, float]]] = []
    for seed in range(seeds):
        plan = Plan(seed, ranks)

        def step(task: Logs, batch: Tensor, batch_idx: int, plan: Plan = plan) -> None:
            micro = task.current_epoch * plan.steps * plan.window + batch_idx
            for name, value, size in plan.calls[micro, rank()]:
                reduction, on_step, on_epoch, _ = plan.names[name]
                given = torch.tensor(value, dtype=torch.float64) if size else value
                task.log(name, given, reduce_fx=reduction, on_step=on_step, on_epoch=on_epoch, batch_size=size)

        data = torch.ones(ranks * plan.steps * plan.window * plan.batch)
        logger, _ = fit(
            Logs(step),
            data,
            plan.batch,
            max_epochs=EPOCHS,
            accumulate_grad_batches=plan.window,
            log_every_n_steps=plan.every,
        )
        outcomes.append([(step, name, value) for step, line in logger.lines for name, value in line.items()])
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_sequence_of_calls_is_reduced_as_by_hand(ranks: int) -> None:
    seeds = 40
    first = on_ranks(log_planned, ranks, seeds, ranks)[0]
    for seed, points in enumerate(first):
        right = sorted(Plan(seed, ranks).expected(ranks))
        points = sorted(points)
        assert [point[:2] for point in points] == [point[:2] for point in right], seed
        assert [point[2] for point in points] == pytest.approx([point[2] for point in right], rel=1e-12, abs=1e-12), (
            seed
        )


# --- names that would stand for two values ------------------------------------------------------


class TwoSteps(ScalarWeight):
    def __init__(self, training: str, validation: str) -> None:
        super().__init__(lr=0.0)
        self.names = training, validation

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(self.names[0], 1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.names[1], 2.0)


def one_name_for_two() -> None:
    quiet_trainer(max_epochs=2, log_every_n_steps=1).fit(
        TwoSteps("loss", "loss"), DataLoader(numbers(4), 2), DataLoader(numbers(4), 2)
    )


def test_a_name_of_both_training_and_validation_is_refused_on_every_rank() -> None:
    for error in errors_of_ranks(one_name_for_two, 2):
        assert "self.log('loss') in training and in validation: one name would stand for two values" in error
    trainer = quiet_trainer(max_epochs=2, log_every_n_steps=1)
    trainer.fit(TwoSteps("train/loss", "val/loss"), DataLoader(numbers(4), 2), DataLoader(numbers(4), 2))
    assert trainer.callback_metrics == {"train/loss": 1.0, "val/loss": 2.0}


@pytest.mark.parametrize("first", ["x", "x_epoch", "x_step"])
def test_a_name_that_another_one_is_published_under_is_refused(first: str) -> None:
    def step(task: Task, batch: Tensor, batch_idx: int) -> None:
        for name in (first, "x" if first != "x" else "x_epoch"):
            task.log(name, 1.0, on_step=name != "x_epoch", on_epoch=name != "x_step")

    with pytest.raises(ValueError, match=r"published as x_step and x_epoch: expected distinct names"):
        quiet_trainer(max_epochs=1).fit(Logs(step), DataLoader(numbers(4), 2))


@pytest.mark.parametrize("name", ["", "step", "hyperparameters"])
def test_names_that_loggers_write_themselves_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Expected a name of its own, such as 'train/loss'"):
        quiet_trainer(max_epochs=1).fit(
            Logs(lambda task, batch, batch_idx: task.log(name, 1.0)), DataLoader(numbers(4), 2)
        )
