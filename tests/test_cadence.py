"""When things happen: steps that log, validations, checkpoints, in which order, and once; also after a resume."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, JSONLLogger, LearningRateMonitor, ModelCheckpoint, TensorBoardLogger
from samestep.callbacks.logger import Logger
from tasks import ScalarWeight, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader

Event = tuple[Any, ...]


class Options(NamedTuple):
    length: int
    """Batches of an epoch."""
    window: int
    log_every: int
    interval: int | float | None
    every_n_epoch: int | None
    save_steps: int
    max_steps: int

    @property
    def is_allowed(self) -> bool:
        """Whether the Trainer takes these together."""
        if self.every_n_epoch is None:
            return isinstance(self.interval, int)
        if isinstance(self.interval, int):
            return self.interval <= self.length
        return self.interval is None or int(self.length * self.interval) > 0


EPOCHS = 3


def expected(options: Options) -> list[Event]:
    """Read off the sentences of the documentation, step by step."""
    events: list[Event] = []
    step = total = newest = 0
    for epoch in range(EPOCHS):
        before = 0
        for batch in range(1, options.length + 1):
            total += 1
            if batch % options.window and batch != options.length:
                continue  # inside a window nothing happens
            step += 1
            if step % options.log_every == 0:
                events.append(("log", step))
            if validation_is_due(options, epoch, before, batch, total):
                events.append(("validate", step))
                newest = step
            before = batch
            stops = step == options.max_steps
            ends = [("epoch values", step)] if batch == options.length or stops else []
            saves = [("save", step, newest)] if step % options.save_steps == 0 else []
            # A checkpoint at an epoch's last step is that of the complete epoch.
            events += ends + saves if batch == options.length else saves + ends
            if stops:
                return events
    return events


def validation_is_due(options: Options, epoch: int, before: int, batch: int, total: int) -> bool:
    """Whether a batch that a validation is due at is among those from `before` + 1 to `batch` of the epoch."""
    if options.every_n_epoch is None:  # multiples of the interval, over all epochs
        first = total - (batch - before) + 1
        return any(number % options.interval == 0 for number in range(first, total + 1))  # pyright: ignore
    if (epoch + 1) % options.every_n_epoch:
        return False
    interval = options.interval
    if interval is None or (interval == 1.0 and isinstance(interval, float)):
        return batch == options.length
    every = interval if isinstance(interval, int) else int(options.length * interval)
    return any(number % every == 0 for number in range(before + 1, batch + 1))


class Trains(ScalarWeight):
    def __init__(self) -> None:
        super().__init__(lr=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.global_step))


class NotesLogs(Logger):
    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def log_metrics(self, metrics: Any, step: int) -> None:
        for name, what in (("loss_step", "log"), ("loss_epoch", "epoch values")):
            if name in metrics:
                self.events.append((what, step))


class NotesValidations(Callback):
    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            self.events.append(("validate", trainer.global_step))


class NotesSaves(ModelCheckpoint):
    """Notes when it would save, and the value it would judge by."""

    def __init__(self, events: list[Event], **options: Any) -> None:
        super().__init__(**options)
        self.events = events

    def _save(self, trainer: Any) -> None:
        self._last_step = trainer.global_step
        self.events.append(("save", trainer.global_step, int(trainer.callback_metrics.get("val", 0))))


def happened(cases: list[Options]) -> list[list[Event]]:
    every: list[list[Event]] = []
    for options in cases:
        events: list[Event] = []
        trainer = quiet_trainer(
            max_epochs=EPOCHS, max_steps=options.max_steps, accumulate_grad_batches=options.window,
            log_every_n_steps=options.log_every, val_check_interval=options.interval,
            check_val_every_n_epoch=options.every_n_epoch, num_sanity_val_steps=0, logger=NotesLogs(events),
            callbacks=[NotesValidations(events), NotesSaves(events, every_n_train_steps=options.save_steps)],
            enable_checkpointing=True,
        )  # fmt: skip
        data = torch.ones(options.length * trainer.world_size)
        trainer.fit(Trains(), DataLoader(data, 1), DataLoader(torch.ones(trainer.world_size), 1))
        every.append(events)
    return every


def some_cases(number: int) -> list[Options]:
    everything = itertools.product(
        range(1, 9), (1, 2, 3), (1, 2, 3), (None, 1.0, 0.5, 0.3, 1, 2, 3, 5, 7), (1, 2, None), (1, 2, 3), (-1, 4)
    )
    allowed = [options for options in itertools.starmap(Options, everything) if options.is_allowed]
    return random.Random(5).sample(allowed, number)


@pytest.mark.parametrize(("ranks", "number"), [(1, 80), (2, 12)])
def test_logs_validations_and_checkpoints_come_when_they_are_said_to(ranks: int, number: int) -> None:
    cases = some_cases(number)
    outcomes = [happened(cases)] if ranks == 1 else run_ranks(happened, ranks, cases)
    for rank, outcome in enumerate(outcomes):
        for options, events in zip(cases, outcome, strict=True):
            wanted = expected(options)
            if rank:  # only rank 0 logs
                wanted = [event for event in wanted if event[0] not in ("log", "epoch values")]
            assert events == wanted, options


def test_a_timed_checkpoint_at_the_last_batch_waits_for_the_validation() -> None:
    events: list[Event] = []

    class AsksForOne(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (0, 2):
                trainer.request_timed_save()

    from datetime import timedelta

    saves = NotesSaves(events, train_time_interval=timedelta(days=1))
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[AsksForOne(), NotesValidations(events), saves], enable_checkpointing=True
    )
    trainer.fit(Trains(), DataLoader(torch.ones(3), 1), DataLoader(torch.ones(1)))
    assert events == [("save", 1, 0), ("validate", 3), ("save", 3, 3)]


# --- schedulers that follow a metric -------------------------------------------------------------


class Plateau(Trains):
    """Notes the values its scheduler is given, as the steps of their validations."""

    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency = frequency
        self.given: list[tuple[int, int]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=0.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        config = {"scheduler": scheduler, "monitor": "val", "interval": "epoch", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.given.append((self.current_epoch, int(metric)))
        scheduler.step(metric)


def plateau_values(frequency: int = 1, **options: Any) -> list[tuple[int, int]]:
    task = Plateau(frequency)
    trainer = quiet_trainer(max_epochs=6, num_sanity_val_steps=0, **options)
    trainer.fit(task, DataLoader(torch.ones(10), 1), DataLoader(torch.ones(1)))
    return task.given


def test_a_plateau_by_epochs_steps_only_on_a_value_of_its_epoch() -> None:
    # Epochs of 10 steps; each value is the step of its validation.
    assert plateau_values() == [(epoch, 10 * (epoch + 1)) for epoch in range(6)]
    assert plateau_values(check_val_every_n_epoch=2) == [(1, 20), (3, 40), (5, 60)]
    assert plateau_values(check_val_every_n_epoch=2, frequency=3) == [(5, 60)]
    assert plateau_values(val_check_interval=4) == [(epoch, 10 * epoch + 8) for epoch in range(6)]


# --- one point per step ----------------------------------------------------------------------------


def points_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point that TensorBoard shows, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def lines_in(file: Path) -> dict[str, list[tuple[int, float]]]:
    import json

    points: dict[str, list[tuple[int, float]]] = {}
    for line in file.read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            points.setdefault(name, []).append((step, value))
    return points


class Changing(Trains):
    """Its rate falls at each step and each epoch; its loss is another at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + 0 * self.w
        self.log("batch", batch.sum())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SavesEverywhere(Callback):
    """Saves after each step, before what ends an epoch, and again where it ends."""

    monitors = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}")

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validation-{trainer.global_step}")

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.global_step}")


def log_all(run: Path, ckpt_path: Path | None = None, callbacks: tuple[Callback, ...] = ()) -> None:
    monitor = LearningRateMonitor()
    trainer = quiet_trainer(
        max_epochs=2, accumulate_grad_batches=2, val_check_interval=4, log_every_n_steps=1, default_root_dir=str(run), seed=1,
        callbacks=[TensorBoardLogger(), JSONLLogger(), monitor, *callbacks], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Changing(), DataLoader(torch.arange(7.0), 1), DataLoader(torch.ones(1)), ckpt_path=ckpt_path)


def earlier(folder: Path) -> None:
    """Put event files a while back: TensorBoard reads them in the order of the seconds in their names."""
    for file in folder.glob("events.out.tfevents.*"):
        file.rename(file.with_name(re.sub(r"(?<=tfevents\.)\d+", lambda found: str(int(found[0]) - 60), file.name)))


READERS: dict[str, Callable[[Path], dict[str, list[tuple[int, float]]]]] = {
    "tensorboard": points_in, "metrics.jsonl": lines_in
}  # fmt: skip


def test_a_resume_at_any_moment_leaves_one_point_for_each_step_and_name(tmp_path: Path) -> None:
    log_all(tmp_path / "run", callbacks=(SavesEverywhere(tmp_path / "saved"),))
    whole = {name: read(tmp_path / "run" / name) for name, read in READERS.items()}
    steps = list(range(1, 9))  # windows of 2, 2, 2 and 1 micro-batches
    for points in whole.values():
        assert {name: [step for step, _ in theirs] for name, theirs in points.items()} == {
            "loss_step": steps, "batch": steps, "lr-SGD": steps, "loss_epoch": [4, 8], "val": [2, 6]
        }  # fmt: skip
    checkpoints = sorted((tmp_path / "saved").iterdir())
    assert len(checkpoints) == 8 + 2 + 2
    for checkpoint in checkpoints:
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        earlier(tmp_path / "again" / "tensorboard")
        log_all(tmp_path / "again", checkpoint)
        for name, read in READERS.items():
            assert read(tmp_path / "again" / name) == whole[name], (checkpoint.name, name)
        shutil.rmtree(tmp_path / "again")


def test_a_test_after_a_fit_is_still_there_when_the_fit_goes_on(tmp_path: Path) -> None:
    class Tests(Trains):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test", batch.mean())

    options: dict[str, Any] = {"default_root_dir": str(tmp_path), "log_every_n_steps": 1, "enable_checkpointing": True}
    trainer = quiet_trainer(max_epochs=1, callbacks=[TensorBoardLogger()], **options)
    trainer.fit(Tests(), DataLoader(torch.ones(2), 1))
    trainer.test(dataloaders=DataLoader(torch.ones(1)), verbose=False)
    trainer.loggers[0].experiment.close()
    earlier(tmp_path / "tensorboard")
    again = quiet_trainer(max_epochs=2, callbacks=[TensorBoardLogger()], **options)
    again.fit(Tests(), DataLoader(torch.ones(2), 1), ckpt_path="auto")
    assert again.global_step == 4
    assert {name: [step for step, _ in points] for name, points in points_in(tmp_path / "tensorboard").items()} == {
        "loss_step": [1, 2, 3, 4], "loss_epoch": [2, 4], "test": [2]
    }  # fmt: skip
