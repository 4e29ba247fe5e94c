"""Learning rates: the curve of a run is that of a plain loop in torch, whatever ranks, window, and resumes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, LearningRateMonitor
from samestep.callbacks.logger import Logger
from samestep.strategies import DDPStrategy
from samestep.trainer import Task, scaled_lr, warmup_schedule
from tasks import Regression, ScalarWeight, numbers, parameters_of, quiet_trainer
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torchs
from torch.utils.data import DataLoader

# --- the curve, by ranks, windows and resumes ------------------------------------------------------


class Halving:
    """A scheduler of one's own: no base class, no `optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.driven, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        self.driven.param_groups[0]["lr"] = 0.4 * 0.5**self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Slope:
    """A factor with a state of its own, which LambdaLR puts into its state dict."""

    def __init__(self) -> None:
        self.by = 0.9

    def __call__(self, step: int) -> float:
        return self.by**step


def one(scheduler: Any, interval: str = "step", frequency: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [{"scheduler": scheduler, "interval": interval, "frequency": frequency, **more}]


Make = Callable[[Optimizer, int], list[dict[str, Any]]]
KINDS: dict[str, Make] = {
    "linear": lambda o, total: one(torchs.LinearLR(o, 0.1, total_iters=max(1, total // 2))),
    "cosine": lambda o, total: one(torchs.CosineAnnealingLR(o, total)),
    "restarts": lambda o, total: one(torchs.CosineAnnealingWarmRestarts(o, 3, 2)),
    "one cycle": lambda o, total: one(torchs.OneCycleLR(o, 1.0, total_steps=total)),
    "cyclic": lambda o, total: one(torchs.CyclicLR(o, 0.1, 0.5, step_size_up=3)),
    "multi step": lambda o, total: one(torchs.MultiStepLR(o, [2, 5, 6])),
    "polynomial": lambda o, total: one(torchs.PolynomialLR(o, total)),
    "function": lambda o, total: one(torchs.LambdaLR(o, lambda step: 1 / (1 + step))),
    "object": lambda o, total: one(torchs.LambdaLR(o, Slope())),
    "ours": lambda o, total: one(warmup_schedule(o, 0.3, total, final_ratio=0.1)),
    "chained": lambda o, total: one(
        torchs.ChainedScheduler([torchs.ConstantLR(o, 0.5, 3), torchs.ExponentialLR(o, 0.9)])
    ),
    "sequential": lambda o, total: one(
        torchs.SequentialLR(o, [torchs.LinearLR(o, 0.1, total_iters=3), torchs.ExponentialLR(o, 0.8)], [3])
    ),
    "every third step": lambda o, total: one(torchs.ExponentialLR(o, 0.5), frequency=3),
    "epochs": lambda o, total: one(torchs.StepLR(o, 1, 0.5), "epoch"),
    "every second epoch": lambda o, total: one(torchs.ExponentialLR(o, 0.5), "epoch", 2),
    "validations": lambda o, total: one(torchs.ExponentialLR(o, 0.7), "validation"),
    "every second validation": lambda o, total: one(torchs.ExponentialLR(o, 0.7), "validation", 2),
    "plateau": lambda o, total: one(torchs.ReduceLROnPlateau(o, factor=0.5, patience=0), "epoch", monitor="val"),
    "plateau by validations": lambda o, total: one(
        torchs.ReduceLROnPlateau(o, factor=0.5, patience=1), "validation", monitor="val"
    ),
    "one's own": lambda o, total: one(Halving(o)),
    "three at once": lambda o, total: [
        *one(torchs.LinearLR(o, 0.1, total_iters=4)),
        *one(torchs.StepLR(o, 1, 0.8), "epoch"),
        *one(torchs.ReduceLROnPlateau(o, factor=0.5, patience=0), "validation", monitor="val"),
    ],
}


class Case(NamedTuple):
    """A run."""

    kind: str
    epochs: int
    batches: int
    window: int
    check: int  # batches between validations
    every: int  # epochs between epochs that validate
    max_steps: int
    saves: tuple[int, ...]  # steps at which to save, and to resume from


def metric_of(validation: int) -> float:
    return [3.0, 2.0, 2.5, 1.0, 1.5, 2.0, 0.5][validation % 7]


def curve_by_hand(case: Case) -> list[float]:
    """The rate that each step uses, by a loop in torch alone."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.4, momentum=0.5)
    steps_an_epoch = math.ceil(case.batches / case.window)
    total = min(case.epochs * steps_an_epoch, case.max_steps if case.max_steps >= 0 else 10**6)
    schedulers = KINDS[case.kind](optimizer, total)
    rates: list[float] = []
    validations, metric, fresh = 0, math.nan, False

    def move(interval: str, count: int, fresh: bool = True) -> None:
        for item in schedulers:
            if item["interval"] == interval and count % item["frequency"] == 0:
                if "monitor" not in item:
                    item["scheduler"].step()
                elif fresh:
                    item["scheduler"].step(metric)

    for epoch in range(case.epochs):
        done, fresh, next_check = 0, False, case.check
        while done < case.batches:
            rates.append(optimizer.param_groups[0]["lr"])
            parameter.grad = torch.zeros(1)
            optimizer.step()
            done = min(done + case.window, case.batches)
            move("step", len(rates))
            if done >= next_check and (epoch + 1) % case.every == 0:
                metric, fresh, next_check = metric_of(validations), True, (done // case.check + 1) * case.check
                validations += 1
                move("validation", validations)
            if len(rates) == total:
                break
        if done == case.batches:
            move("epoch", epoch + 1, fresh)
        if len(rates) == total:
            break
    return rates


class Kept(Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines += [(step, dict(metrics))]

    def rates(self, name: str = "lr-SGD") -> list[tuple[int | None, float]]:
        return [(step, line[name]) for step, line in self.lines if name in line]


class Scheduled(Task):
    """One weight, and the schedulers of a case. What is validated differs from rank to rank; its mean does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ranks = self.trainer.world_size
        share = 2 * (self.global_rank + 1) / (ranks + 1)  # 1 on average
        self.log("val", share * metric_of(self.trainer.progress.validations))

    def configure_optimizers(self) -> Any:
        optimizer = SGD([self.w], lr=0.4, momentum=0.5)
        return [optimizer], KINDS[self.kind](optimizer, int(self.trainer.estimated_stepping_batches))


class Saves(Callback):
    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def run_case(case: Case, saves: str | None = None, resume: str | None = None) -> list[tuple[int | None, float]]:
    kept = Kept()
    trainer = quiet_trainer(
        max_epochs=case.epochs, max_steps=case.max_steps, accumulate_grad_batches=case.window, logger=kept,
        val_check_interval=case.check, check_val_every_n_epoch=case.every, num_sanity_val_steps=0, strategy=DDPStrategy(),
        callbacks=[LearningRateMonitor("step"), *([Saves(saves, case.saves)] if saves else [])],
    )  # fmt: skip
    batches = [torch.ones(1)] * case.batches
    trainer.fit(Scheduled(case.kind), batches, batches[:1], ckpt_path=resume)
    assert trainer.lr_scheduler_configs[0].interval in ("step", "epoch", "validation")
    return kept.rates() if trainer.is_global_zero else []


def curves(cases: list[Case], folder: str) -> list[list[list[tuple[int | None, float]]]]:
    """Of each case the whole run, and those resumed from each of its saves."""
    found: list[list[list[tuple[int | None, float]]]] = []
    for index, case in enumerate(cases):
        place = f"{folder}/{index}"
        whole = run_case(case, saves=place)
        found.append([whole, *(run_case(case, resume=f"{place}/{step}") for step in case.saves)])
    return found


def cases(seed: int) -> Iterator[Case]:
    """One of each kind, with numbers drawn."""
    draw = random.Random(seed)
    for kind in KINDS:
        epochs, batches, window = draw.randint(1, 4), draw.randint(1, 7), draw.randint(1, 4)
        total = epochs * math.ceil(batches / window)
        most = draw.choice([-1, -1, draw.randint(1, total)])
        total = total if most < 0 else min(most, total)
        saves = tuple(sorted(draw.sample(range(1, total + 1), min(2, total))))
        yield Case(kind, epochs, batches, window, draw.randint(1, batches), draw.randint(1, 2), most, saves)


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's own SequentialLR gives it
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_curve_is_that_of_a_loop_in_torch_on_any_ranks_in_any_windows_and_resumed_anywhere(
    ranks: int, tmp_path: Path
) -> None:
    chosen = list(cases(seed=ranks))
    for case, (whole, *resumed) in zip(chosen, run_ranks(curves, ranks, chosen, str(tmp_path))[0], strict=True):
        expected = list(enumerate(curve_by_hand(case), 1))
        assert whole == expected, case  # to the bit, one value for each step
        for step, tail in zip(case.saves, resumed, strict=True):
            assert tail == expected[step:], (case, step)


def halfway(window: int) -> float:
    """LinearLR from 0 to 1 over 8 steps, stopped at 4."""

    class Ramp(ScalarWeight):
        def configure_optimizers(self) -> Any:
            optimizer = SGD([self.w], lr=1.0)
            return [optimizer], one(torchs.LinearLR(optimizer, 0.5, total_iters=8))

    trainer = quiet_trainer(max_steps=4, accumulate_grad_batches=window, strategy=DDPStrategy())
    trainer.fit(Ramp(), [torch.ones(1)] * 32)
    return trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ramp_over_8_steps_is_half_way_at_4_on_any_number_of_ranks(ranks: int) -> None:
    assert run_ranks(halfway, ranks, 1) == run_ranks(halfway, ranks, 2) == [pytest.approx(0.75, abs=1e-15)] * ranks


class OneCycle(Regression):
    """As long as the trainer says. Each sample counts once, in whatever micro-batch it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch) * len(batch[0]), "weight": len(batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        assert isinstance(steps, int)  # torch takes no other
        return [optimizer], one(torchs.OneCycleLR(optimizer, 0.1, total_steps=steps))


def train_one_cycle(batch_size: int, window: int) -> tuple[list[Any], torch.Tensor]:
    torch.manual_seed(0)
    task, kept = OneCycle(), Kept()
    trainer = quiet_trainer(
        max_epochs=3, precision=64, seed=1, accumulate_grad_batches=window, strategy=DDPStrategy(), logger=kept,
        callbacks=[LearningRateMonitor("step", log_momentum=True)],
    )  # fmt: skip
    trainer.fit(task, DataLoader(numbers(58), batch_size, shuffle=True))
    return kept.lines, parameters_of(task)


def test_ranks_and_windows_with_the_same_global_batch_train_alike_with_the_same_rates() -> None:
    """12 samples a step, however they are split; the last of an epoch has 10."""
    rates, weights = train_one_cycle(12, 1)
    assert [step for step, line in rates if "lr-SGD" in line] == list(range(1, 16))
    for ranks, batch_size, window in ((1, 4, 3), (2, 6, 1), (2, 2, 3)):
        lines, theirs = run_ranks(train_one_cycle, ranks, batch_size, window)[0]
        assert lines == rates
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-12)


def one_overflow(overflows: tuple[int, ...]) -> tuple[list[Any], int]:
    """Some micro-batches give inf; their steps are skipped."""

    class Overflows(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.w * (float("inf") if batch_idx in overflows and self.global_rank == 0 else 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = SGD([self.w], lr=1.0)
            return [optimizer], one(torchs.LambdaLR(optimizer, lambda step: 0.5**step))

    kept = Kept()
    trainer = quiet_trainer(
        max_epochs=1, precision="16-mixed", logger=kept, callbacks=[LearningRateMonitor("step")], strategy=DDPStrategy()
    )
    trainer.fit(Overflows(), [torch.ones(1)] * 8)
    return kept.rates(), trainer.global_step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_the_scaler_skips_moves_no_schedule_and_has_no_rate(ranks: int) -> None:
    for overflows in ((2, 5), (3, 4), (7,), (1,)):
        rates, steps = run_ranks(one_overflow, ranks, overflows)[0]
        assert steps == 8 - len(overflows)
        assert rates == [(step + 1, 0.5**step) for step in range(steps)]


# --- how long a run will be ----------------------------------------------------------------------------


class Gate:
    """Closed until the optimizers are there: nobody may begin to read before."""

    def __init__(self) -> None:
        self.is_open = False


class OwnBatches:
    """A number of batches for each rank."""

    def __init__(self, batches: list[int], gate: Gate) -> None:
        self.batches, self.gate = batches, gate

    def __iter__(self) -> Iterator[torch.Tensor]:
        assert self.gate.is_open
        return iter([torch.ones(1)] * len(self))

    def __len__(self) -> int:
        return self.batches[torch.distributed.get_rank() % len(self.batches)]


class Gated(DataLoader[Any]):
    gate: Gate

    def __iter__(self) -> Any:
        assert self.gate.is_open
        return super().__iter__()


class Asks(ScalarWeight):
    """Takes steps that change nothing, and asks beforehand how many there will be."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * 0

    def configure_optimizers(self) -> Any:
        before = torch.get_rng_state()
        self.steps = self.trainer.estimated_stepping_batches
        assert torch.equal(torch.get_rng_state(), before)
        self.gate.is_open = True
        return super().configure_optimizers()


def estimates(seed: int) -> list[tuple[Any, float, int]]:
    """Of runs with options drawn: the estimate, and the steps that were then taken."""
    draw = random.Random(seed)
    found: list[tuple[Any, float, int]] = []
    for number in range(24):
        options: dict[str, Any] = {"accumulate_grad_batches": draw.randint(1, 4), "max_epochs": draw.randint(1, 3)}
        if draw.random() < 0.5:
            options |= {"max_steps": draw.randint(1, 12), "max_epochs": draw.choice([-1, None, options["max_epochs"]])}
        options["limit_train_batches"] = draw.choice([1.0, draw.randint(1, 6), draw.uniform(0.5, 1.0)])
        gate, dealt = Gate(), number % 2 == 0
        uneven = draw.choice([None, "join", "stop"] if dealt else ["join", "stop"])
        if dealt:
            given: Any = (draw.randint(12, 30), draw.randint(1, 3), draw.choice([True, False]))
            loader: Any = Gated(numbers(given[0]), given[1], drop_last=given[2], shuffle=True)
            loader.gate = gate
        else:
            given = [draw.randint(2, 9), draw.randint(2, 9)]
            loader = OwnBatches(given, gate)
        strategy = DDPStrategy(uneven_inputs=uneven)
        trainer = quiet_trainer(**options, use_distributed_sampler=dealt, strategy=strategy)
        task = Asks(gate)
        trainer.fit(task, loader)
        found.append(((given, uneven, options), task.steps, trainer.global_step))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_many_steps_are_taken_as_were_estimated_and_nothing_was_read_for_it(ranks: int) -> None:
    for case, estimate, steps in run_ranks(estimates, ranks, ranks)[0]:
        assert estimate == steps, case


class Endless(ScalarWeight):
    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        self.trainer.should_stop = True
        return super().configure_optimizers()


def test_a_run_without_a_known_end_says_so() -> None:
    class Stream:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(1)] * 3)

    with pytest.raises(RuntimeError, match="the training loader has no length"):
        quiet_trainer(max_epochs=2).fit(Endless(), Stream())
    for options, steps in (
        ({"max_epochs": 2, "max_steps": 4}, 4),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": -1}, math.inf),
    ):
        task = Endless()
        quiet_trainer(**options).fit(task, Stream())
        assert task.steps == steps


def test_what_is_known_in_a_fit_only_says_so() -> None:
    class Early(ScalarWeight):
        def setup(self, stage: str) -> None:
            with pytest.raises(RuntimeError, match="estimated_stepping_batches is known inside fit only"):
                _ = self.trainer.estimated_stepping_batches
            with pytest.raises(RuntimeError, match="global_batch_size is known inside fit only"):
                _ = self.trainer.global_batch_size

    trainer, task = quiet_trainer(max_epochs=1), Early()
    trainer.fit(task, [torch.ones(1)])
    with pytest.raises(RuntimeError, match="the training loader has no batch_size"):
        _ = trainer.global_batch_size
    trainer.fit(task, [torch.ones(1)] * 2)  # not that of the fit before, either


# --- plateaus, and schedulers of one's own ---------------------------------------------------------------


def test_a_plateau_sees_each_value_once_and_none_before_the_first() -> None:
    """Without improvement since the first: a rate halved for each value after it, not for each epoch."""
    seen: list[float] = []

    class Plateau(ScalarWeight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

        def on_train_epoch_start(self) -> None:
            seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = SGD([self.w], lr=8.0)
            plateau = torchs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val"}

    batches = [torch.ones(1)] * 4
    quiet_trainer(max_epochs=8, check_val_every_n_epoch=3).fit(Plateau(), batches, batches)
    assert seen == [8, 8, 8, 8, 8, 8, 4, 4]
    seen.clear()
    quiet_trainer(max_epochs=3, val_check_interval=3).fit(Plateau(), batches, batches)  # at 3 of 4 batches
    assert seen == [8, 8, 4]


class Momentary:
    """As a plateau scheduler, of no known class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.seen = optimizer, []

    def step(self, metric: Any) -> None:
        self.seen.append(float(metric))
        self.optimizer.param_groups[0]["lr"] = float(metric)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Watched(ScalarWeight):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", float(self.current_epoch), on_step=False, on_epoch=True)
        return self.w * 0

    def configure_optimizers(self) -> Any:
        optimizer = SGD([self.w], lr=8.0)
        return [optimizer], [{"scheduler": Momentary(optimizer), "monitor": "train", **self.options}]


def test_a_scheduler_of_ones_own_gets_the_metric_where_it_says_so() -> None:
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(Watched(reduce_on_plateau=True, frequency=2), [torch.ones(1)])
    assert trainer.lr_scheduler_configs[0].scheduler.seen == [1.0]
    with pytest.raises(TypeError, match=r"Momentary.step\(metric.*say reduce_on_plateau=True"):
        quiet_trainer(max_epochs=1).fit(Watched(), [torch.ones(1)])
    with pytest.raises(ValueError, match="Momentary needs the metric it watches"):
        quiet_trainer(max_epochs=1).fit(Watched(reduce_on_plateau=True, monitor=None), [torch.ones(1)])
    with pytest.raises(ValueError, match="Momentary with interval='step' is refused"):
        quiet_trainer(max_epochs=1).fit(Watched(reduce_on_plateau=True, interval="step"), [torch.ones(1)])


def test_lr_scheduler_step_of_the_task_replaces_the_trainers() -> None:
    calls: list[tuple[str, Any]] = []

    class Own(Watched):
        def configure_optimizers(self) -> Any:
            optimizers, (own,) = super().configure_optimizers()
            return optimizers, [own, *one(torchs.ExponentialLR(optimizers[0], 0.5))]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            calls.append((type(scheduler).__name__, metric))

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Own(reduce_on_plateau=True), [torch.ones(1)])
    steps = [("ExponentialLR", None), ("Momentary", 0.0), ("ExponentialLR", None), ("Momentary", 1.0)]
    assert calls == steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == 8.0
    assert trainer.learning_rates().last is None  # nobody knows what the task will do


class SavesIn(Callback):
    """Saves in a hook, once."""

    def __init__(self, path: Path, hook: str, step: int) -> None:
        self.path, self.hook, self.step = path, hook, step

    def save(self, trainer: Any, hook: str) -> None:
        if hook == self.hook and trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "batch end")

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        self.save(trainer, "validation end")

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.save(trainer, "epoch end")


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("batch end", 2),
        ("batch end", 3),
        ("batch end", 4),
        ("validation end", 2),
        ("validation end", 4),
        ("epoch end", 4),
    ],
)
@pytest.mark.parametrize("kind", ["epochs", "plateau", "validations", "plateau by validations", "three at once"])
def test_a_run_saved_in_any_hook_goes_on_with_the_same_rates(kind: str, hook: str, step: int, tmp_path: Path) -> None:
    """Also at the end of an epoch, before its schedulers had their turn, and before a validation."""
    case = Case(kind, epochs=3, batches=4, window=1, check=2, every=1, max_steps=-1, saves=())

    def rates(resume: Path | None, *callbacks: Callback) -> list[tuple[int | None, float]]:
        kept = Kept()
        trainer = quiet_trainer(
            max_epochs=case.epochs, val_check_interval=case.check, num_sanity_val_steps=0, logger=kept,
            callbacks=[LearningRateMonitor("step"), *callbacks],
        )  # fmt: skip
        trainer.fit(Scheduled(kind), [torch.ones(1)] * case.batches, [torch.ones(1)], ckpt_path=resume)
        return kept.rates()

    expected = list(enumerate(curve_by_hand(case), 1))
    assert rates(None, SavesIn(tmp_path / "saved", hook, step)) == expected
    assert rates(tmp_path / "saved") == expected[step:]


# --- what is logged ---------------------------------------------------------------------------------------


class TwoOptimizers(Task):
    """The first steps in every batch, the second in every other; each has a schedule, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pairs = list(zip(self.optimizers(), self.lr_schedulers(), strict=True))
        for optimizer, scheduler in pairs if batch_idx % 2 else pairs[:1]:
            optimizer.zero_grad()
            self.manual_backward(self.a + self.b)
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [SGD([self.a], lr=1.0), SGD([self.b], lr=2.0)]
        first, second = (torchs.ExponentialLR(optimizer, 0.5) for optimizer in optimizers)
        return optimizers, [{"scheduler": first}, {"scheduler": second, "name": "second"}]


def test_two_optimizers_have_each_its_own_schedule_and_name() -> None:
    kept = Kept()
    trainer = quiet_trainer(max_epochs=1, logger=kept, callbacks=[LearningRateMonitor("step")])
    trainer.fit(TwoOptimizers(), [torch.ones(1)] * 4)
    assert kept.rates() == [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]
    assert kept.rates("second") == [(2, 2.0), (4, 1.0)]
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers] == [1 / 16, 0.5]


class Grouped(Regression):
    """Two groups under one schedule by steps, or by epochs."""

    def __init__(self, interval: str, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.interval, self.names = interval, names

    def configure_optimizers(self) -> Any:
        groups: list[Any] = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.5}]
        for group, name in zip(groups, self.names, strict=False):
            group["name"] = name
        optimizer = SGD(groups, lr=1.0)
        return [optimizer], one(torchs.ExponentialLR(optimizer, 0.5), self.interval)


def logged(task: Task, every: int = 2, **monitor: Any) -> list[tuple[int | None, dict[str, float]]]:
    kept = Kept()
    callbacks = [LearningRateMonitor(**monitor)]
    trainer = quiet_trainer(max_epochs=2, logger=kept, log_every_n_steps=every, callbacks=callbacks, precision=64)
    trainer.fit(task, DataLoader(numbers(9), 3))
    return [(step, line) for step, line in kept.lines if any("lr-SGD" in name for name in line)]


def test_groups_are_told_apart_by_their_names_or_numbers() -> None:
    names = ("body", "head")
    for given, expected in (((), ("pg1", "pg2")), (names, names), (("body",), ("body", "pg2"))):
        first = logged(Grouped("step", given), logging_interval="step")[0][1]
        assert first == {f"lr-SGD/{expected[0]}": 1.0, f"lr-SGD/{expected[1]}": 0.5}
    with pytest.raises(ValueError, match="two parameter groups of the SGD have the same name"):
        logged(Grouped("step", ("body", "body")))


def test_each_interval_logs_the_rate_that_was_used_and_none_twice() -> None:
    def rates(interval: str | None, schedule: str, every: int = 2) -> list[tuple[int | None, float]]:
        lines = logged(Grouped(schedule), every, logging_interval=interval)
        return [(step, line["lr-SGD/pg1"]) for step, line in lines]

    halved = [(step + 1, 0.5**step) for step in range(6)]
    assert rates("step", "step") == halved
    assert rates("epoch", "step") == [halved[2], halved[5]]
    assert rates(None, "step") == [halved[1], halved[3], halved[5]]
    assert rates("epoch", "epoch") == [(3, 1.0), (6, 0.5)]
    assert rates(None, "epoch") == [(2, 1.0), (3, 1.0), (4, 0.5), (6, 0.5)]
    assert rates(None, "epoch", every=50) == [(3, 1.0), (6, 0.5)]


def test_an_epoch_that_is_resumed_at_its_last_step_logs_its_rate_once(tmp_path: Path) -> None:
    def rates(resume: Path | None, *callbacks: Callback) -> list[tuple[int | None, float]]:
        kept = Kept()
        trainer = quiet_trainer(
            max_epochs=3, logger=kept, callbacks=[LearningRateMonitor("epoch"), *callbacks], strategy=DDPStrategy()
        )
        trainer.fit(Scheduled("epochs"), [torch.ones(1)] * 2, ckpt_path=resume)
        return kept.rates()

    assert rates(None, Saves(str(tmp_path), (2, 3))) == [(2, 0.4), (4, 0.2), (6, 0.1)]
    assert rates(tmp_path / "2") == [(2, 0.4), (4, 0.2), (6, 0.1)]
    assert rates(tmp_path / "3") == [(4, 0.2), (6, 0.1)]


# --- the helpers --------------------------------------------------------------------------------------------


def factors(steps: int, *arguments: Any, **options: Any) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_schedule(optimizer, *arguments, **options)
    rates: list[float] = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_the_warm_up_goes_up_in_a_line_and_down_as_it_is_told() -> None:
    assert factors(10, 3, 7, "linear") == pytest.approx([0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0, 0], abs=1e-15)
    assert factors(4, 0, 4, "linear", final_ratio=0.5) == [1, 0.875, 0.75, 0.625]
    assert factors(6, 1, 5, final_ratio=0.2) == pytest.approx(
        [0.5, 1, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2, 0.2]
    )
    assert factors(5, 2, 4, final_ratio=1.0) == [1 / 3, 2 / 3, 1, 1, 1]
    assert factors(3, 0.5, 1) == [1, 0, 0]  # half of one step is none


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_every_schedule_rises_to_the_full_rate_and_falls_to_its_end(decay: str) -> None:
    draw = random.Random(0)
    for _ in range(200):
        total, ratio = draw.randint(1, 60), draw.choice([0.0, draw.random(), 1.0])
        warmup: Any = draw.choice([draw.randrange(total), draw.random()])
        rates = factors(total + 3, warmup, total, decay, final_ratio=ratio)
        below = warmup if isinstance(warmup, int) else int(warmup * total)
        assert rates[below] == max(rates) == 1
        assert rates[0] > 0
        rising, falling = rates[: below + 1], rates[below : total + 1]
        assert rising == sorted(set(rising))
        assert falling == sorted(falling, reverse=True)
        assert rates[total:] == [pytest.approx(ratio, abs=1e-15)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 10), "no step would be left at the full rate"),
        ((-1, 10), r"warmup=-1\): expected a number of steps \(int\), or a share"),
        ((1.0, 10), "warmup=1.0"),
        ((True, 10), "warmup=True"),
        ((math.nan, 10), "warmup=nan"),
        ((0.1, math.inf), "A run without end has none: set max_epochs or max_steps"),
        ((0.1, 0), "total_steps=0"),
        ((0.1, 2.5), "total_steps=2.5"),
        ((0.1, "10"), "total_steps='10'"),
        ((0.1, 10, "exponential"), "decay='exponential'.: expected 'cosine' or 'linear'"),
        ((0.1, 10, "cosine", 1.5), "final_ratio=1.5"),
        ((0.1, 10, "cosine", math.nan), "final_ratio=nan"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        factors(1, *arguments)


def test_the_rate_is_scaled_with_the_batch_or_its_root() -> None:
    assert scaled_lr(0.1, 256, 8192) == 0.1 * 32  # Goyal et al. 2017: 3.2 for ImageNet in an hour
    assert scaled_lr(0.1, 256, 64) == 0.025
    assert scaled_lr(1e-3, 64, 1024, "sqrt") == pytest.approx(4e-3, rel=1e-15)
    for arguments, message in (
        ((0, 256, 512), "base_lr=0"), ((0.1, 0, 512), "base_batch=0"), ((0.1, 256, None), "global_batch=None"),
        ((0.1, 256, math.inf), "global_batch=inf"), ((0.1, 256, 512, "square"), "rule='square'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            scaled_lr(*arguments)  # type: ignore[arg-type]


def rate_of_batch() -> tuple[int, float]:
    class Scaled(Regression):
        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=scaled_lr(0.1, 6, self.trainer.global_batch_size))

    trainer = quiet_trainer(max_epochs=1, precision=64, accumulate_grad_batches=2, strategy=DDPStrategy())
    trainer.fit(Scaled(), DataLoader(numbers(24), 3))
    return trainer.global_batch_size, trainer.optimizers[0].param_groups[0]["lr"]


def test_the_global_batch_is_known_when_the_rate_is_chosen() -> None:
    assert run_ranks(rate_of_batch, 1) == [(6, 0.1)]
    assert run_ranks(rate_of_batch, 2) == [(12, 0.2)] * 2
