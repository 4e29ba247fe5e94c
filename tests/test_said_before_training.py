"""What is said, or refused, before the first step: rates of a resumed run, samples left out, arguments of hooks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, ModelCheckpoint, ProgressBar
from samestep.callbacks.logger import Logger
from samestep.callbacks.wording import counted
from samestep.trainer import DataModule, Task
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch.utils.data import DataLoader, DistributedSampler


def panel(task: Task, *loaders: Any, ckpt_path: Any = None, **options: Any) -> dict[str, str]:
    """The step panel's lines by their labels; none on other ranks than 0."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        trainer = quiet_trainer(**{"max_epochs": 1, "precision": 64, "enable_model_summary": True, **options})
        trainer.fit(task, *loaders, ckpt_path=ckpt_path)
    lines = output.getvalue().splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("step ")), len(lines))
    return dict(line.split("  ", 1) for line in lines[begin:] if "  " in line)


# --- learning rates --------------------------------------------------------------------------


class Peaked(Regression):
    """Steps: 1, 2, … 8, 7, … 1 tenths, so that each step has a rate of its own on both sides of the peak."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step + 1, max(1, 15 - step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_the_rates_of_a_resumed_run_are_those_from_here_on(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "seed": 1, "enable_checkpointing": True}
    fresh = panel(Peaked(), loader(64, 8), callbacks=[keep], **options)
    assert fresh["learning rate"].strip() == "0.1 now, 0.8 at its highest (step 8), 0.1 last"
    for step, expected in (
        (4, "0.5 now, 0.8 at its highest from here on (step 8), 0.1 last"),
        (8, "0.7 now, 0.7 at its highest from here on (step 9), 0.1 last"),
        (12, "0.3 now, 0.3 at its highest from here on (step 13), 0.1 last"),
    ):
        again = panel(Peaked(), loader(64, 8), ckpt_path=tmp_path / f"step={step}", max_epochs=2)
        assert again["learning rate"].strip() == expected
        assert again["length"].endswith(f"16 steps in all; {step} done")


def test_the_rates_of_a_task_that_steps_by_itself_are_not_guessed() -> None:
    class ByHand(Peaked):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    assert panel(ByHand(), loader(8, 4))["learning rate"].strip().startswith("0.1 now; what follows depends")


# --- numbers and nouns -----------------------------------------------------------------------


def test_one_has_no_plural() -> None:
    assert [counted(n, "batch") for n in (0, 1, 2, 1234)] == ["0 batches", "1 batch", "2 batches", "1,234 batches"]
    assert [counted(n, "epoch") for n in (1, 2)] == ["1 epoch", "2 epochs"]
    lines = panel(Regression(), loader(1, 1))
    assert lines["step"].strip() == "1 rank × micro-batch 1 × 1 accumulated = 1 sample"
    assert lines["length"].strip() == "1 step an epoch, 1 epoch: 1 step in all"


# --- what is logged and shown ----------------------------------------------------------------


def test_a_run_too_short_to_log_a_step_says_so() -> None:
    assert panel(Regression(), loader(16, 4))["logging"].strip() == (
        "no values of steps: the run ends before log_every_n_steps=50 is reached; set it to 4 or less"
    )
    assert "logging" not in panel(Regression(), loader(16, 4), log_every_n_steps=4)
    assert "logging" in panel(Regression(), loader(16, 4), log_every_n_steps=5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("loaders", "options", "total"),
    [
        ([loader(12, 4)], {}, 3),
        ([loader(12, 4), loader(8, 4)], {}, 5),
        ([loader(12, 4), loader(8, 4)], {"limit_val_batches": 1}, 2),
    ],
)
def test_the_bar_of_an_evaluation_knows_its_end(
    loaders: list[Any], options: dict[str, Any], total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Several(Regression):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    monkeypatch.setattr("sys.stderr", Terminal())
    import sys

    trainer = quiet_trainer(precision=64, callbacks=[ProgressBar()], **options)
    trainer.validate(Several(), loaders, verbose=False)
    assert f"0/{total} [" in sys.stderr.getvalue()  # type: ignore[attr-defined]


# --- samples left out, and loaders that nobody deals -----------------------------------------


class Endless:
    """A user's wrapper around a DataLoader."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def panel_of(what: str) -> dict[str, str]:
    training: Any = loader(16, 4)
    validation: Any = loader(11, 2, drop_last=True)
    if what == "wrapped":
        training, validation = Endless(training), [Endless(loader(4, 4)), loader(4, 1)]
    elif what == "sampler":
        training = DataLoader(training.dataset, 4, sampler=DistributedSampler(training.dataset))
        validation = loader(12, 2)

    class Several(Regression):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    return panel(Several(), training, validation)


def test_what_an_evaluation_leaves_out_is_said() -> None:
    assert panel_of("dropped")["validation"].strip() == (
        "1 sample of each epoch left out: it would fill no batch (drop_last=True)"
    )
    first, second = run_ranks(panel_of, 2, "dropped")
    # Ranks of 6 and 5 samples: three batches, and two.
    assert first["validation"].strip() == "1 sample of each epoch left out: it would fill no batch (drop_last=True)"
    assert second == {}


def test_a_loader_that_nobody_deals_is_said() -> None:
    first, _ = run_ranks(panel_of, 2, "wrapped")
    assert first["training"].strip().startswith("not dealt: every rank reads all of it (Endless is no DataLoader")
    assert first["validation 0"].strip().startswith("not dealt: every rank reads all of it")
    assert "validation 1" not in first
    assert "training" not in panel_of("wrapped"), "one rank has nobody to share with"
    first, _ = run_ranks(panel_of, 2, "sampler")
    assert not {"training", "validation"} & set(first)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_of_its_own_says_it_too(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Whole(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None: ...

        def predict_step(self, batch: Any, batch_idx: int) -> None: ...

    getattr(quiet_trainer(precision=64), stage)(Whole(), loader(11, 4, drop_last=True))
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{stage}: 3 samples of each epoch left out: they would fill no batch (drop_last=True)"
    getattr(quiet_trainer(precision=64, limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1), stage)(
        Whole(), loader(11, 4, drop_last=True)
    )
    assert "left out" not in capsys.readouterr().out, "a limit leaves out what it is told to"


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
@pytest.mark.parametrize("moment", ["start", "end"])
@pytest.mark.parametrize("holder", ["callback", "task"])
def test_a_hook_that_can_not_be_told_the_loader_is_refused_before_the_first_batch(
    stage: str, moment: str, holder: str
) -> None:
    seen: list[int] = []

    def step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        seen.append(batch_idx)

    if holder == "callback":
        hook: Any = {
            "start": lambda self, trainer, task, batch, batch_idx: None,
            "end": lambda self, trainer, task, outputs, batch, batch_idx: None,
        }[moment]
    else:
        hook = {
            "start": lambda self, batch, batch_idx: None,
            "end": lambda self, outputs, batch, batch_idx: None,
        }[moment]
    members = {f"on_{stage}_batch_{moment}": hook}
    callbacks = [type("Watches", (Callback,), members)()] if holder == "callback" else []
    kind = type("Watched", (Regression,), {f"{stage}_step": step, **(members if holder == "task" else {})})
    trainer = quiet_trainer(precision=64, callbacks=callbacks, max_epochs=1, num_sanity_val_steps=0)
    method = getattr(trainer, "validate" if stage == "validation" else stage)
    expected = rf"on_{stage}_batch_{moment}\(.*can't take the arguments it is called with: expected .*dataloader_idx"
    with pytest.raises(TypeError, match=expected):
        method(kind(), [loader(4, 4), loader(4, 4)])
    if stage == "validation":
        with pytest.raises(TypeError, match=expected):
            trainer.fit(kind(), loader(4, 4), [loader(4, 4), loader(4, 4)])
        assert trainer.global_step == 0
    assert seen == []
    method(kind(), loader(4, 4))
    assert seen == [0], "with one loader it may leave the argument out"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, r"Mine has no log_metrics\(metrics, step\)"),
        ({"log_metrics": lambda self, metrics: None}, r"Mine.log_metrics\(self, metrics\) can't take"),
        ({"log_metrics": lambda self, metrics, number: None}, r"expected \(self, metrics, step\)"),
        (
            {"log_metrics": lambda self, metrics, step: None, "log_hyperparams": lambda self: None},
            r"Mine.log_hyperparams\(self\).*expected \(self, params\)",
        ),
        (
            {"log_metrics": lambda self, metrics, step: None, "finalize": lambda self: None},
            r"Mine.finalize\(self\).*expected \(self, status\)",
        ),
    ],
)
def test_a_logger_that_can_not_take_its_arguments_is_refused_at_construction(
    members: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        quiet_trainer(logger=type("Mine", (Logger,), members)())


@pytest.mark.parametrize(
    ("base", "name", "wrong"),
    [
        (Callback, "load_state_dict", lambda self: None),
        (Callback, "state_dict", lambda self, more: {}),
        (Callback, "teardown", lambda self, trainer, task: None),
        (ScalarWeight, "optimizer_step", lambda self, epoch, batch_idx, optimizer: None),
        (ScalarWeight, "configure_gradient_clipping", lambda self, optimizer: None),
        (ScalarWeight, "transfer_batch_to_device", lambda self, batch, device: batch),
        (ScalarWeight, "on_before_batch_transfer", lambda self, batch: batch),
        (ScalarWeight, "lr_scheduler_step", lambda self, scheduler: None),
        (DataModule, "on_after_batch_transfer", lambda self, batch: batch),
        (DataModule, "setup", lambda self: None),
    ],
)
def test_other_methods_that_can_not_take_their_arguments_are_refused(base: type, name: str, wrong: Any) -> None:
    instance: Any = type("Mine", (base,), {name: wrong})()
    with pytest.raises(TypeError, match=rf"Mine.{name}\(.*can't take the arguments it is called with: expected \(self"):
        quiet_trainer(callbacks=[instance] if base is Callback else None).fit(
            instance if base is ScalarWeight else ScalarWeight(),
            DataLoader(torch.ones(2), 1),
            datamodule=instance if base is DataModule else None,
        )
