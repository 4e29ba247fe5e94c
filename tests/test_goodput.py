"""Where a run's time went: counted by a clock that only what is counted moves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samestep.callbacks import Goodput, ModelCheckpoint
from samestep.callbacks.goodput import ledger
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader, Dataset

STEP, ITEM, VALIDATION, SAVE, SETUP, EPOCH_END = 3.0, 1.0, 5.0, 2.0, 7.0, 4.0
# What lies between a process and the next.
DOWN = 100.0


class Clock:
    """A clock that stands still but where something takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e6
        for name in ("monotonic", "time"):
            monkeypatch.setattr(time, name, lambda: self.now)

    def takes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class TimedData(Dataset[Any]):
    def __init__(self, clock: Clock, length: int) -> None:
        self.clock, self.length = clock, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.clock.takes(ITEM)
        return torch.ones(())


class Timed(ScalarWeight):
    def __init__(self, clock: Clock, dies_at: int | None = None) -> None:
        super().__init__(lr=0.01)
        self.clock, self.dies_at = clock, dies_at

    def setup(self, stage: str) -> None:
        self.clock.takes(SETUP)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.dies_at:
            raise KeyboardInterrupt
        self.clock.takes(STEP)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.takes(VALIDATION)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.takes(SAVE)

    def on_train_epoch_end(self) -> None:
        self.clock.takes(EPOCH_END)


def run(clock: Clock, folder: Path, dies_at: int | None = None, ckpt_path: str | None = None) -> dict[str, Any]:
    trainer = quiet_trainer(
        max_epochs=1, num_sanity_val_steps=1, default_root_dir=folder, enable_checkpointing=True,
        callbacks=[Goodput(), ModelCheckpoint(every_n_train_steps=3)],
    )  # fmt: skip
    fit: Callable[[], None] = lambda: trainer.fit(  # noqa: E731
        Timed(clock, dies_at),
        DataLoader(TimedData(clock, 8), 1),
        DataLoader(TimedData(clock, 2), 1),
        ckpt_path=ckpt_path,
    )
    if dies_at is None:
        fit()
    else:
        with pytest.raises(KeyboardInterrupt):
            fit()
    return json.loads((folder / "goodput.json").read_text())


def test_every_second_is_in_one_part(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(clock, tmp_path)
    expected = {
        "steps": 8 * STEP, "data": 8 * ITEM, "evaluation": 2 * (VALIDATION + ITEM), "saving": 2 * SAVE,
        "startup": SETUP + VALIDATION + ITEM, "other": EPOCH_END, "lost": 0.0, "down": 0.0,
    }  # fmt: skip
    assert {part: found[part] for part in expected} == expected
    assert found["total"] == sum(expected.values())
    assert found["goodput"] == 24 / 65
    assert (found["lost_steps"], found["restarts"], found["exposed_communication"]) == (0, 0, 0.0)
    line = "goodput 36.9% of 65 s (0.0% waiting for gradients); startup 20.0%, evaluation 18.5%, data 12.3%, saving 6.2%, other 6.2%"
    assert line in capsys.readouterr().out


def test_steps_behind_the_last_checkpoint_are_lost_and_the_ledger_goes_on(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(clock, tmp_path, dies_at=5)  # saved at step 3: two steps are done again
    clock.takes(DOWN)
    found = run(clock, tmp_path, ckpt_path="auto")
    assert (found["restarts"], found["lost_steps"], found["down"]) == (1, 2, DOWN)
    assert found["lost"] == 2 * STEP
    assert found["steps"] == 8 * STEP  # of 5 + 5 that were done
    assert found["data"] == 11 * ITEM  # the step that failed had its batch, too
    assert "; 2 steps done again after a restart" in capsys.readouterr().out
    anew = run(clock, tmp_path)  # another run in the same folder
    assert (anew["restarts"], len(anew["attempts"])) == (0, 1)


def test_an_attempt_that_did_nothing_loses_nothing() -> None:
    parts = {"data": 0.0, "evaluation": 0.0, "saving": 0.0, "startup": 1.0, "other": 0.0}
    first = {**parts, "steps": 0.0, "begun": 0.0, "ended": 1.0, "first_step": 4, "last_step": 4}
    second = {**parts, "steps": 8.0, "begun": 3.0, "ended": 12.0, "first_step": 4, "last_step": 8}
    found = ledger([first, second])
    assert (found["lost"], found["lost_steps"], found["down"], found["steps"]) == (0.0, 0, 2.0, 8.0)
