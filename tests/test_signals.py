"""Signals: all ranks save at the same step and leave, and the run goes on from there as if nothing had been."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_ranks import end_ranks
from run_ranks import run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.trainer import Preempted, Trainer, control
from samestep.trainer.checkpoint import newest_intact
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch.utils.data import DataLoader


class Draws(Regression):
    """Its steps and validations draw random numbers, so that one drawn too often is seen in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace.append(f"step {self.global_step}")
        x, y = batch
        return self.loss((x + 0.1 * torch.randn_like(x), y))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            self.trace.append(f"validation {self.global_step}")
        self.log("val/loss", self.loss(batch) + torch.randn((), dtype=torch.float64))


class StepEnds(Callback):
    """Notes when a step's end comes."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        task.trace.append(f"end {trainer.global_step}")


def train(folder: str, faults: str, **options: Any) -> tuple[Any, Draws, Trainer]:
    """One fit of two epochs of 8 steps; returns how it ended (None: whole), the task and the trainer."""
    os.environ["SAMESTEP_CHAOS"] = faults
    keep = ModelCheckpoint(monitor="val/loss", every_n_train_steps=4, save_top_k=-1)
    trainer = quiet_trainer(**{
        "max_epochs": 2, "precision": 64, "seed": 1, "enable_checkpointing": True, "default_root_dir": folder,
        "callbacks": [StepEnds(), keep], "val_check_interval": 3, **options,
    })  # fmt: skip
    task = Draws()
    data = loader(16 * trainer.world_size, 2, shuffle=True), loader(8 * trainer.world_size, 2)
    try:
        trainer.fit(task, *data, ckpt_path="auto")
    except Preempted as end:
        return end, task, trainer
    return None, task, trainer


def state_of(task: Draws, trainer: Trainer) -> Any:
    return parameters_of(task).tolist(), trainer.progress.state_dict(), float(trainer.callback_metrics["val/loss"])


def leave_and_go_on(cases: list[str], options: dict[str, Any]) -> list[Any]:
    """For each faults: how the run ended, what is in its folder, what a whole run comes to, and what the resumed one does."""
    control.PERIOD = 0.0  # a word after every step: these steps are so fast that an epoch takes no second
    results: list[Any] = []
    _, task, trainer = train("whole", "", **options)
    whole, trace = state_of(task, trainer), task.trace
    for number, faults in enumerate(cases):
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        end, first, ended = train(f"run-{number}", faults, **options)
        assert {each: signal.getsignal(each) for each in before} == before
        assert end is not None, faults
        _, second, resumed = train(f"run-{number}", "", **options)
        while first.trace and first.trace[-1].startswith("validation"):
            first.trace.pop()  # cut short, and done again
        results.append({
            "faults": faults, "code": end.code, "step": ended.global_step, "kind": type(end).__name__, "text": str(end),
            "same state": state_of(second, resumed) == whole, "same trace": first.trace + second.trace == trace,
            "traces": (first.trace, second.trace, trace),
        })  # fmt: skip
    return results


CASES = [
    ("term rank=RANK step=3", 143, "Preempted"),
    ("usr1 rank=RANK step=8", 143, "Preempted"),  # the first step of the second epoch
    ("int rank=RANK step=6", 130, "Interrupted"),
    ("term step=4", 143, "Preempted"),  # on all
    ("term rank=RANK step=7", 143, "Preempted"),  # in the epoch's last step
    ("term rank=RANK step=4; term rank=RANK step=4", 143, "Preempted"),
    ("term rank=RANK step=4 phase=saving", 143, "Preempted"),
    ("term rank=RANK phase=sanity", 143, "Preempted"),
    ("term rank=RANK step=3 phase=validation", 143, "Preempted"),
    ("int rank=RANK step=11 phase=validation", 130, "Interrupted"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_on_any_rank_ends_all_at_one_step_and_the_run_goes_on_as_if_nothing_had_been(
    ranks: int, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    cases = [faults.replace("RANK", str(number % ranks)) for number, (faults, _, _) in enumerate(CASES)]
    every = run_ranks(leave_and_go_on, ranks, cases, {}, timeout=100)
    for results in every:
        assert [result["step"] for result in results] == [result["step"] for result in every[0]]
        for result, (_, code, kind) in zip(results, CASES, strict=True):
            assert (result["code"], result["kind"]) == (code, kind), result
            assert result["same state"], result
            assert result["same trace"], result
            assert "saved in run-" in result["text"]


AT_THE_END = ["term rank=0 step=7", "term rank=0 step=8 phase=validation", "term rank=0 step=16 phase=validation"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_validation_at_an_epochs_end_lets_it_be_done_again(ranks: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for results in run_ranks(leave_and_go_on, ranks, AT_THE_END, {"val_check_interval": 1.0}, timeout=100):
        assert [result["step"] for result in results] == [8, 8, 16]
        for result in results:
            assert result["same state"], result
            assert result["same trace"], result


# --- where nobody asks between steps ---------------------------------------------------------


class Prepares(Draws):
    """Gets a signal while rank 0 prepares data and the others wait."""

    def prepare_data(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("a signal during the preparation is obeyed at once")


def train_plainly(folder: str) -> None:
    keep = ModelCheckpoint(every_n_train_steps=2)
    trainer = quiet_trainer(
        max_steps=4, precision=64, enable_checkpointing=True, callbacks=[keep], default_root_dir=folder
    )
    trainer.fit(Draws(), loader(32, 2), loader(8, 2), ckpt_path="auto")


def prepare(folder: str) -> None:
    quiet_trainer(max_epochs=1, precision=64, default_root_dir=folder).fit(Prepares(), loader(32, 2))


def evaluate(folder: str) -> None:
    quiet_trainer(precision=64, default_root_dir=folder).validate(Draws(), loader(8, 2))


@pytest.mark.parametrize(
    ("function", "faults", "code", "peers_place"),
    [
        (train_plainly, "term rank=1 phase=setup", 143, "fit, epoch 0, step 0"),
        (train_plainly, "usr1 rank=1 phase=loading", 143, "fit, epoch 0, step 0"),
        (evaluate, "int rank=1 phase=validation", 130, "validation, epoch 0, step 0"),
        (prepare, "", 143, ""),
    ],
)
def test_before_training_a_signal_ends_all_ranks_at_once(
    function: Any, faults: str, code: int, peers_place: str, tmp_path: Path
) -> None:
    if "loading" in faults:
        assert [each.exit_code for each in end_ranks(train_plainly, 2, "run")] == [0, 0]
    first, second = end_ranks(function, 2, "run", faults=faults)
    assert (first.exit_code, second.exit_code) == (code, code), first.told + second.told
    if "loading" in faults:
        told = json.loads(Path("run/status.json").read_text())
        assert (told["status"], told["rank"], told["place"]) == ("preempted", 1, peers_place)
        assert told["reason"] == "rank 1 got SIGUSR1"


# --- handlers --------------------------------------------------------------------------------


class Kills(ScalarWeight):
    """Sends this process signals in its third batch."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            for number in self.numbers:
                os.kill(os.getpid(), number)
        return super().training_step(batch, batch_idx)


def ones(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


def kill_twice(*numbers: int) -> None:
    from samestep.trainer import signals

    signals._SAME_WISH = 0.0  # pyright: ignore
    quiet_trainer(max_epochs=1, default_root_dir="run", enable_checkpointing=True).fit(Kills(*numbers), ones())


@pytest.mark.parametrize(
    ("numbers", "code", "told"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 143, "rank 0 got SIGTERM again, and ends without saving"),
        ((signal.SIGINT, signal.SIGINT), 130, "rank 0 got SIGINT again"),
        ((signal.SIGUSR1, signal.SIGTERM), 143, ""),  # the warning, and then the end: the save goes on
    ],
)
def test_the_same_signal_again_ends_a_rank_at_once(
    numbers: tuple[int, ...], code: int, told: str, tmp_path: Path
) -> None:
    (ended,) = end_ranks(kill_twice, 1, *numbers)
    assert ended.exit_code == code, ended.told
    assert told in ended.told
    assert ("again" in ended.told) == bool(told)
    status = json.loads(Path("run/status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("interrupted" if code == 130 else "preempted", code)
    assert told in status["reason"]
    assert ("without saving" in status["reason"]) == bool(told)


def test_the_programs_own_handler_is_called_and_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def own(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        trainer = quiet_trainer(max_epochs=1)
        with pytest.raises(
            Preempted, match=r"SIGUSR1 received \(epoch 0, step 3\): nothing is saved, since there is no"
        ):
            trainer.fit(Kills(signal.SIGUSR1), ones())
        assert seen == [signal.SIGUSR1]
        assert trainer.global_step == 3
        assert signal.getsignal(signal.SIGUSR1) is own
        quiet_trainer(max_epochs=1, enable_signal_handlers=False).fit(Kills(signal.SIGUSR1), ones())
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "nothing is saved" in capsys.readouterr().out


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(Kills(signal.SIGINT), ones())
        assert trainer.global_step == 8
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_outside_of_the_main_thread_leaves_signals_alone() -> None:
    trainer = quiet_trainer(max_epochs=1)
    thread = threading.Thread(target=trainer.fit, args=(ScalarWeight(), ones()))
    thread.start()
    thread.join(60)
    assert trainer.global_step == 8


class KillsWorkers(ScalarWeight):
    """Sends SIGINT and SIGUSR1 to the loader's workers, as a terminal and a scheduler do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for worker in multiprocessing.active_children():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def test_workers_of_loaders_go_on_after_a_signal_to_the_whole_group() -> None:
    trainer = quiet_trainer(max_epochs=1)
    with_workers = DataLoader(torch.ones(8), 1, num_workers=2, multiprocessing_context="fork")
    trainer.fit(KillsWorkers(), with_workers)
    assert trainer.global_step == 8


def test_a_signal_that_comes_after_training_is_not_lost() -> None:
    class Late(ScalarWeight):
        def on_fit_end(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Late(), ones())
    assert trainer.global_step == 8
    status = json.loads((trainer.run_folder / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("completed", 130)


def test_what_is_saved_at_a_signal_is_removed_by_the_run_after_the_next() -> None:
    def run(task: Any, epochs: int) -> list[str]:
        keep = ModelCheckpoint("kept", every_n_epochs=1)
        trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[keep])
        try:
            trainer.fit(task, ones(), ckpt_path="auto")
        except Preempted:
            assert keep.last_model_path == "kept/step-00000003"
        return sorted(name for name in os.listdir("kept") if not name.startswith("."))

    assert run(Kills(signal.SIGTERM), 1) == ["step-00000003"]
    assert str(newest_intact([Path("kept")])) == "kept/step-00000003"
    assert run(ScalarWeight(), 1) == ["step-00000003", "step-00000008"]  # a user who doubts the new one can go back
    assert run(ScalarWeight(), 2) == ["step-00000008", "step-00000016"]
