"""What people see: bar, lines, summary, tables."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from samestep.callbacks import LearningRateMonitor, ModelSummary, ProgressBar
from samestep.callbacks.logger import Logger
from samestep.callbacks.model_summary import summarize
from samestep.trainer import Task
from tasks import Regression, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def fit(stderr: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    trainer = quiet_trainer(max_epochs=2, precision=64, log_every_n_steps=1, **options)
    trainer.fit(Shown(), loader(12, 4), loader(4, 4))
    return stderr.getvalue()


def test_no_terminal_gets_a_line_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fit(io.StringIO(), monkeypatch, callbacks=[ProgressBar()]).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/2 · batch 3/3 · step 3 · ")
    assert lines[1].startswith("epoch 2/2 · batch 3/3 · step 6 · ")
    assert "loss " in lines[1]


def test_no_terminal_gets_lines_between_when_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fit(io.StringIO(), monkeypatch, callbacks=[ProgressBar(line_seconds=0.0)]).splitlines()
    assert [line.split(" · ")[1] for line in lines[:4]] == ["batch 1/3", "batch 2/3", "batch 3/3", "batch 3/3"]
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = fit(Terminal(), monkeypatch, callbacks=[ProgressBar(refresh_seconds=0.0)])
    assert "epoch 1/2" in text
    assert "3/3" in text
    assert "loss " in text
    assert "validate" in text


def test_the_bar_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise KeyError("broken")
            return super().training_step(batch, batch_idx)

    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    bar = ProgressBar()
    with pytest.raises(KeyError):
        quiet_trainer(max_epochs=1, precision=64, callbacks=[bar]).fit(Fails(), loader(12, 4))
    assert bar._bar is None
    assert stderr.getvalue().endswith("\n")


class Nested(Task):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.encoder.requires_grad_(False)


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["encoder", "head"]),
        (2, ["encoder", "encoder.0", "encoder.1", "head"]),
        (-1, ["encoder", "encoder.0", "encoder.1", "head"]),
    ],
)
def test_the_summary_counts_parameters(depth: int, names: list[str]) -> None:
    lines = summarize(Nested(), depth).splitlines()
    assert lines[-1] == "18 trainable parameters, 40 not; 0.00 MiB"
    assert [line.split()[0] for line in lines[2:-2]] == names
    if names:
        assert lines[2].split() == ["encoder", "Sequential", "40"]


def test_the_summary_says_what_stays_in_eval_mode(capsys: pytest.CaptureFixture[str]) -> None:
    task = Shown()
    task.net[0].eval()
    quiet_trainer(max_epochs=1, precision=64, callbacks=[ModelSummary()]).fit(task, loader(8, 4))
    assert "in eval mode, and left so: net.0" in capsys.readouterr().out
    assert not task.net[0].training


def test_results_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet_trainer(precision=64)
    trainer.validate(Regression(), loader(8, 4))
    assert capsys.readouterr().out.splitlines()[0].split() == ["validate", "value"]

    class Two(Regression):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", float(dataloader_idx))

    trainer.validate(Two(), [loader(8, 4), loader(4, 4)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "validate"
    assert lines[1].split() == ["loss", "0", "1"]


class Kept(Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


def test_the_learning_rate_of_a_step_is_the_one_it_used() -> None:
    class Warm(Regression):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.5}]
            optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
            halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    kept = Kept()
    trainer = quiet_trainer(
        max_epochs=1, precision=64, log_every_n_steps=2, logger=kept,
        callbacks=[LearningRateMonitor(log_momentum=True, log_weight_decay=True)],
    )  # fmt: skip
    trainer.fit(Warm(), loader(16, 4))
    rates = [(step, line["lr-SGD/pg1"], line["lr-SGD/pg2"]) for step, line in kept.lines]
    assert rates == [(2, 0.5, 0.25), (4, 0.125, 0.0625)]
    assert kept.lines[0][1]["lr-SGD/pg1-momentum"] == 0.9
    assert kept.lines[0][1]["lr-SGD/pg1-weight_decay"] == 0.0


def test_a_generator_of_batches_without_tensors_needs_a_batch_size() -> None:
    class Texts(Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("length", float(len(batch[0])))

    with pytest.raises(ValueError, match=r"can't tell the batch size.*batch_size=…"):
        quiet_trainer().validate(Texts(), DataLoader(["a", "bb"], 1), verbose=False)  # type: ignore[arg-type]
