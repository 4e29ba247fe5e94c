"""Learning rates: the curve of a run is that of a plain loop in torch, whatever ranks, window, and resumes."""

from __future__ import annotations

import math
import random
import tempfile
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
