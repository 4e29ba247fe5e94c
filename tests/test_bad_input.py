"""Wrong input gets one clear error at the earliest point, on every rank, and nothing hangs."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks
from samestep.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary
from samestep.strategies import DDPStrategy, SingleDeviceStrategy
from samestep.trainer import Task, Trainer
from samestep.trainer.config import OPTION_NAMES
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch.utils.data import DataLoader

WRONG_OPTIONS: dict[str, list[Any]] = {
    "accelerator": ["tpu", "gpu"],
    "devices": [0, -1, "two", [], [0], 1.5],
    "num_nodes": [0, 2, "1"],
    "strategy": ["dpp", "fsdp", 3],
    "precision": [8, "fp32", "bf16-half", "half", 16.0],
    "max_epochs": [-2, 1.5, "3", True],
    "min_epochs": [-1, 0.5],
    "max_steps": [-2, 2.0],
    "min_steps": [-1, "a"],
    "max_time": ["1 hour", "00:12", {"hour": 1}, 5],
    "limit_train_batches": [-1, 1.5, "all", True],
    "limit_val_batches": [-0.1],
    "limit_test_batches": [2.5],
    "limit_predict_batches": ["x"],
    "fast_dev_run": [-1, "yes", 1.0],
    "overfit_batches": [-1, 3.5],
    "val_check_interval": [0, -1, 1.5, 0.0, "1"],
    "check_val_every_n_epoch": [0, -1, 0.5],
    "num_sanity_val_steps": [-2, 1.0],
    "log_every_n_steps": [0, -1, 2.5],
    "logger": ["tensorboard", 1],
    "enable_checkpointing": ["no", 0],
    "enable_progress_bar": ["x"],
    "enable_model_summary": [2],
    "enable_signal_handlers": [2],
    "max_restarts": [-1, 1.5, 3],
    "accumulate_grad_batches": [0, -1, 1.5, {0: 4}],
    "gradient_clip_val": [0, -1.0, "1", True, float("nan")],
    "gradient_clip_algorithm": ["l2"],
    "deterministic": ["maybe", 1],
    "benchmark": ["on"],
    "inference_mode": [2],
    "detect_anomaly": ["x"],
    "use_distributed_sampler": [1],
    "sync_batchnorm": ["yes"],
    "reload_dataloaders_every_n_epochs": [-1, 1.5],
    "per_sample_seed": [1],
    "resume_batch": ["same"],
    "skip_nonfinite": [0, 1.5, True],
    "hang_timeout": [0, -1.0, "10", True, float("nan")],
    "hang_action": ["kill"],
    "seed": [-1, 1.5, "seven", 2**63],
    "default_root_dir": [5],
}


def test_every_option_is_tried() -> None:
    assert set(WRONG_OPTIONS) == set(OPTION_NAMES)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG_OPTIONS for value in WRONG_OPTIONS[name]])
def test_a_wrong_option_is_refused_at_construction(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name) as error:
        quiet_trainer(**{name: value})
    assert repr(value) in str(error.value) or str(value) in str(error.value), "says what was received"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epoch": 3}, "did you mean 'max_epochs'"),
        ({"zzz": 3}, "the options are accelerator"),
        ({"default_root_dir": ""}, "default_root_dir=''"),
        ({"min_epochs": 5, "max_epochs": 3}, "min_epochs=5 is above max_epochs=3"),
        ({"min_steps": 5, "max_steps": 3}, "min_steps=5 is above max_steps=3"),
        ({"check_val_every_n_epoch": None}, "val_check_interval must be a whole number"),
        ({"strategy": DDPStrategy}, r"expected an object, strategy=DDPStrategy\(\)"),
        ({"strategy": DDPStrategy(), "sync_batchnorm": True}, r"strategy=DDPStrategy\(sync_batchnorm=True\)"),
        ({"callbacks": [ModelSummary]}, "callbacks hold the class ModelSummary"),
        ({"callbacks": ["summary"]}, "callbacks hold a str"),
        ({"callbacks": [ModelCheckpoint()]}, "enable_checkpointing=False, but"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        quiet_trainer(**options)


def test_one_callback_given_twice() -> None:
    summary = ModelSummary()
    with pytest.raises(ValueError, match="given twice"):
        quiet_trainer(callbacks=[summary, summary])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPStrategy(bucket_cap_mb=0), "bucket_cap_mb=0"),
        (lambda: DDPStrategy(timeout=timedelta(0)), "timeout"),
        (lambda: ModelCheckpoint(mode="best"), "mode='best'"),
        (lambda: ModelCheckpoint(""), "dirpath=''"),
        (lambda: ModelCheckpoint(save_top_k=2), "without monitor"),
        (lambda: ModelCheckpoint(save_top_k=-2), "save_top_k=-2"),
        (lambda: ModelCheckpoint(every_n_epochs=1, every_n_train_steps=5), "expected one of them"),
        (lambda: ModelCheckpoint(every_n_train_steps=0), "every_n_train_steps=0"),
        (lambda: ModelCheckpoint(train_time_interval=timedelta(0)), "train_time_interval"),
        (lambda: EarlyStopping("x", mode="up"), "mode='up'"),
        (lambda: EarlyStopping("x", patience=-1), "patience=-1"),
        (lambda: EarlyStopping("x", patience=2.5), r"patience=2\.5\): expected a whole number"),  # pyright: ignore
        (lambda: EarlyStopping("x", patience=True), "patience=True"),
        (lambda: EarlyStopping(""), "monitor=''"),
        (lambda: EarlyStopping(3), "monitor=3"),  # pyright: ignore
        (lambda: EarlyStopping("x", min_delta=-0.1), r"min_delta=-0\.1"),
        (lambda: EarlyStopping("x", min_delta="0.1"), r"min_delta='0\.1'"),  # pyright: ignore
        (lambda: EarlyStopping("x", min_delta=math.inf), "min_delta=inf"),
        (lambda: EarlyStopping("x", stopping_threshold="1"), "stopping_threshold='1'"),  # pyright: ignore
        (lambda: EarlyStopping("x", divergence_threshold=math.nan), "divergence_threshold=nan"),
        (lambda: EarlyStopping("x", check_finite=1), "check_finite=1"),  # pyright: ignore
        (lambda: EarlyStopping("x", check_on_train_epoch_end="no"), "check_on_train_epoch_end='no'"),  # pyright: ignore
        (lambda: LearningRateMonitor("batch"), "logging_interval='batch'"),
        (lambda: ModelSummary(-2), "max_depth=-2"),
    ],
)
def test_wrong_arguments_of_callbacks_and_strategies(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- hooks -----------------------------------------------------------------------------------


class Misspelt(Callback):
    def on_train_batch_ended(self, *_: Any) -> None: ...


class WrongArguments(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any) -> None: ...


class MisspeltTask(Regression):
    def on_train_epoch_ends(self) -> None: ...


class TaskWithTrainerArgument(Regression):
    def on_train_epoch_end(self, trainer: Any) -> None: ...


def test_a_misspelt_hook_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        TypeError, match=r"Misspelt\.on_train_batch_ended is no hook.*did you mean 'on_train_batch_end'"
    ):
        quiet_trainer(callbacks=[Misspelt()])
    with pytest.raises(TypeError, match=r"WrongArguments\.on_train_batch_end.*expected .*outputs, batch, batch_idx"):
        quiet_trainer(callbacks=[WrongArguments()])
    with pytest.raises(TypeError, match=r"MisspeltTask\.on_train_epoch_ends is no hook.*'on_train_epoch_end'"):
        quiet_trainer().fit(MisspeltTask(), loader(8, 4))
    with pytest.raises(TypeError, match=r"TaskWithTrainerArgument\.on_train_epoch_end.*expected \(self\)"):
        quiet_trainer().fit(TaskWithTrainerArgument(), loader(8, 4))


# --- tasks and loaders -----------------------------------------------------------------------


class NoStep(Task):
    def configure_optimizers(self) -> Any:
        return None


class NoOptimizers(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Returns(ScalarWeight):
    """training_step returns what it is told to."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "detached": loss.detach(),
            "vector": self.w * batch,
            "number": 3.0,
            "empty": {},
        }[self.what]


class Optimizers(ScalarWeight):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD([self.w], lr=1.0)
        other = torch.optim.SGD([self.w], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
        return {
            "none": None,
            "text": "sgd",
            "two": [sgd, other],
            "key": {"optimiser": sgd},
            "scheduler key": {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "intervals": "step"}},
            "interval": {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": "batch"}},
            "frequency": {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "frequency": 0}},
            "plateau": {"optimizer": sgd, "lr_scheduler": plateau},
            "plateau step": {
                "optimizer": sgd,
                "lr_scheduler": {"scheduler": plateau, "monitor": "x", "interval": "step"},
            },
            "stranger": {"optimizer": other, "lr_scheduler": schedule},
            "lbfgs": torch.optim.LBFGS([self.w]),
            "no scheduler": {"optimizer": sgd, "lr_scheduler": {"interval": "step"}},
            "number": {"optimizer": sgd, "lr_scheduler": 0.1},
        }[self.what]


def ones(samples: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), **{"batch_size": 2, **options})


def fit(what: str) -> None:
    """Do something wrong."""
    options: dict[str, Any] = {"max_epochs": 1}
    task: Any = ScalarWeight()
    data: Any = ones()
    val: Any = None
    if what == "no step":
        task = NoStep()
    elif what == "no optimizers":
        task = NoOptimizers()
    elif what == "module":
        task = torch.nn.Linear(1, 1)
    elif what.startswith("returns "):
        task = Returns(what.removeprefix("returns "))
    elif what.startswith("optimizers "):
        task = Optimizers(what.removeprefix("optimizers "))
    elif what == "empty loader":
        data = ones(0)
    elif what == "too few":
        data = ones(1, drop_last=True)
    elif what == "empty validation":
        task, data, val = Regression(), loader(8, 4), loader(0, 4)
    elif what == "no loader":
        data = None
    elif what == "iterator":
        data = iter(ones())
    elif what == "not iterable":
        data = 5
    elif what == "several":
        data = {"a": ones(), "b": 5}
    elif what == "no validation step":
        val = ones()
    elif what == "share":
        options |= {"limit_train_batches": 0.01}
    elif what == "nothing to train":
        options |= {"limit_train_batches": 0}
    elif what == "interval above epoch":
        task, data, val = Regression(), loader(8, 4), loader(8, 4)
        options |= {"val_check_interval": 100}
    elif what == "clip by hand":
        task.automatic_optimization = False
        options |= {"gradient_clip_val": 1.0}
    elif what == "monitor":
        options |= {"callbacks": [EarlyStopping("val/acc")]}
    elif what == "no length":
        data = type("Endless", (), {"__iter__": lambda self: iter(ones())})()
        options |= {"strategy": DDPStrategy(uneven_inputs="error")}
    elif what == "no logger":
        options |= {"callbacks": [LearningRateMonitor()]}
    quiet_trainer(**options).fit(task, data, val)


ON_ANY_RANKS = {
    "no step": "NoStep has no training_step, which fit needs",
    "no optimizers": "NoOptimizers has no configure_optimizers",
    "module": "expected a Task, received Linear",
    "returns detached": "needs no gradient",
    "returns vector": r"shape \[",
    "returns number": "returned a float: expected the loss",
    "returns empty": "a dict with nothing: expected the loss",
    "optimizers none": "returned None: expected an optimizer",
    "optimizers text": "returned a str",
    "optimizers two": "automatic optimization takes one",
    "optimizers key": "unknown key 'optimiser'.*did you mean 'optimizer'",
    "optimizers scheduler key": "no key 'intervals': did you mean 'interval'",
    "optimizers interval": "interval='batch', expected one of epoch, step, validation",
    "optimizers frequency": "frequency=0",
    "optimizers plateau": "needs the metric it watches",
    "optimizers plateau step": "interval='step' is refused",
    "optimizers stranger": "drives an optimizer that is not returned",
    "optimizers lbfgs": "LBFGS evaluates the loss several times",
    "optimizers no scheduler": "needs the key 'scheduler'",
    "optimizers number": "the scheduler is a float",
    "empty loader": "the training loader has no batch.*a dataset of 0 samples",
    "too few": "the training loader has no batch.*drop_last=True",
    "empty validation": "the validation loader has no batch",
    "no loader": "fit has no training loader",
    "iterator": "used up after one epoch",
    "not iterable": "the training loader is a int",
    "several": "b.* is a int: expected a DataLoader",
    "no validation step": "ScalarWeight has no validation_step",
    "share": "limit_train_batches=0.01 of . training batches is none",
    "nothing to train": "leaves no batch to train on",
    "interval above epoch": "val_check_interval=100 is more than the . batch",
    "clip by hand": "work with automatic optimization only",
    "monitor": "EarlyStopping monitors 'val/acc', which was not logged",
    "no logger": "LearningRateMonitor needs a logger",
}
ON_SEVERAL_RANKS = {
    "no length": "has no length: on 2 ranks one could end before the others",
}


@pytest.mark.parametrize("what", ON_ANY_RANKS)
def test_on_one_rank(what: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"(?s){ON_ANY_RANKS[what]}"):
        fit(what)


def errors_of_each(cases: list[str]) -> list[str]:
    """What each case raised on this rank; one process for all, which also shows that an error leaves no trace."""
    messages: list[str] = []
    for what in cases:
        try:
            fit(what)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("nothing")
    return messages


def test_on_two_ranks() -> None:
    import re

    from run_ranks import run_ranks

    expected = ON_ANY_RANKS | ON_SEVERAL_RANKS
    cases = list(expected)
    for messages in run_ranks(errors_of_each, 2, cases):
        for what, message in zip(cases, messages, strict=True):
            assert re.search(expected[what], message, re.DOTALL), f"{what}: {message}"


# --- what differs from rank to rank -----------------------------------------------------------


def rank() -> int:
    import os

    return int(os.environ["RANK"])


class Differs(Regression):
    def __init__(self, what: str) -> None:
        super().__init__()
        if rank() == 1:
            if what == "shape":
                self.net[0] = torch.nn.Linear(6, 9)
            elif what == "dtype":
                self.net.double()
            elif what == "frozen":
                self.net[0].requires_grad_(False)
            elif what == "name":
                self.other = self.net
                del self.net
            elif what == "buffer":
                self.register_buffer("extra", torch.zeros(3))
            elif what == "more":
                self.extra = torch.nn.Linear(2, 2)


def fit_differing(what: str) -> None:
    if what == "length":
        data: Any = [torch.ones(2)] * (3 + rank())
        quiet_trainer(max_epochs=1).fit(ScalarWeight(), data)
    quiet_trainer(max_epochs=1).fit(Differs(what), loader(8, 2))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"rank 1 has task.net.0.weight \[9, 6\].*rank 0 has task.net.0.weight \[8, 6\]"),
        ("dtype", "rank 1 has .* float64 .*rank 0 has .* float32"),
        ("frozen", "rank 1 has task.net.0.weight .*, frozen"),
        ("name", r"rank 1 has task.other.0.weight .*rank 0 has task.net"),
        ("buffer", r"rank 1 has task.extra \(buffer\).*rank 0 has nothing more"),
        ("more", "rank 1 has task.extra.weight"),
        ("length", "rank 0: 3, rank 1: 4"),
    ],
)
def test_ranks_that_differ_get_the_same_error(what: str, message: str) -> None:
    import re

    for error in errors_of_ranks(fit_differing, 2, what):
        assert re.search(message, error, re.DOTALL), error


def test_strategy_for_one_process_refuses_several() -> None:
    for error in errors_of_ranks(_single, 2):
        assert "strategy='single_device' (SingleDeviceStrategy) on 2 processes" in error


def _single() -> None:
    Trainer(strategy=SingleDeviceStrategy(), accelerator="cpu")
