"""Nothing hangs in silence: who waits for whom is said within seconds, by rank, phase, place and stack."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from run_ranks import RankError, run_ranks
from samestep.callbacks import Callback
from samestep.strategies import DDPStrategy
from samestep.trainer.hangs import watch
from samestep.trainer.hangs.judgement import Beat, judge
from samestep.trainer.hangs.whereabouts import stack_lines
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.timeout(300)  # eight hangs in one go

LIMIT = 2.0
STEPS = 6
STALLED = 3  # the batch at which a rank stalls


class Told:
    """Whether a rank has printed what is wrong. Each rank's stderr is a file in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> bool:
        return any("no progress for" in path.read_text() for path in self.folder.glob("stderr-*"))

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while not self() and time.monotonic() < deadline:
            time.sleep(0.05)


def sleeps(told: Told) -> None:
    told.wait()  # the line of the user's that is named


def lingers(told: Told) -> None:
    """Until each rank has left what it knows, the late one where it is late."""
    deadline = time.monotonic() + 60
    while len(list(told.folder.glob("run/hangs/*/flight-recorder-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)


def loops(told: Told) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if int(time.monotonic() * 100) % 10 == 0 and told():
            return


def locks(told: Told) -> None:
    lock = threading.Lock()
    lock.acquire()
    helper = threading.Thread(target=lambda: (told.wait(), lock.release()))
    helper.start()
    lock.acquire()
    helper.join()


def stops(told: Told) -> None:
    process = os.getpid()
    time.sleep(LIMIT / 2)  # so that it was heard of here
    if (helper := os.fork()) == 0:
        os.kill(process, signal.SIGSTOP)
        told.wait()
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)


class Stalls(ScalarWeight):
    """One rank stalls in a step."""

    def __init__(self, where: str, rank: int, stall: Callable[[], None]) -> None:
        super().__init__(lr=0.01)
        self.where, self.stalling, self.stall = where, rank, stall

    def stall_in(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == STALLED and self.global_rank == self.stalling:
            self.stall()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stall_in("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stall_in("on_train_batch_end", batch_idx)


class StallingData(Dataset[Any]):
    def __init__(self, rank: int, stall: Callable[[], None] | None) -> None:
        self.rank, self.stall = rank, stall

    def __len__(self) -> int:
        return 3 * STEPS

    def __getitem__(self, index: int) -> Any:
        if self.stall is not None and index == 3 * STALLED + self.rank:
            self.stall()
        return torch.ones(())


def report_of(folder: Path, where: str, rank: int, stall: Callable[[Told], None], workers: int = 0) -> None:
    """Train on this rank, with one that stalls until that is told."""
    own = int(os.environ["RANK"])
    folder.mkdir(exist_ok=True)
    told = Told(folder)
    before = sys.stderr
    with (folder / f"stderr-{own}").open("w", buffering=1) as sys.stderr:
        data = StallingData(rank, partial(stall, told)) if where == "data" else StallingData(rank, None)
        loader = DataLoader(data, 1, num_workers=workers, multiprocessing_context="fork" if workers else None)
        trainer = quiet_trainer(
            max_epochs=1, hang_timeout=LIMIT, strategy=DDPStrategy(timeout=timedelta(seconds=60)),
            enable_checkpointing=stall is lingers, default_root_dir=folder / "run",
        )  # fmt: skip
        trainer.fit(Stalls(where, rank, partial(stall, told)), loader)
        assert trainer.global_step == STEPS
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep hang")]
    sys.stderr = before


CASES: dict[str, tuple[Any, ...]] = {
    "sleep": ("training_step", 1, lingers),
    "loop": ("training_step", 2, loops),
    "lock": ("on_train_batch_end", 1, locks),
    "data": ("data", 1, sleeps),
    "worker": ("data", 1, sleeps, 1),
    "stopped": ("training_step", 1, stops),
    "rank 0": ("training_step", 0, sleeps),
    "rank 0 stopped": ("training_step", 0, stops),
}


def some_reports(folder: str, port: int, names: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name in names:
        report_of(Path(folder) / name, *CASES[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, str]:
    """What all ranks printed, by case."""
    with_store(some_reports, 3, folder, list(CASES))
    return {name: printed(folder / name) for name in CASES}


def with_store(function: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Run the function on ranks that meet in a store of this process, as in that of torchrun's agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(function, ranks, str(folder), store.port, *args, timeout=240, join_group=False)


def printed(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("stderr-*")))


HERE = r"\(test_hang_reporter\.py:\d+\)"
EXPECTED = {
    "sleep": rf"ranks 0, 2 wait in the backward's all-reduce; rank 1 has not come: it is in training_step {HERE}",
    "loop": rf"ranks 0, 1 wait in the backward's all-reduce; rank 2 has not come: it is in training_step {HERE}",
    "lock": rf"ranks 0, 2 wait in the backward's all-reduce; rank 1 has not come: it is in on_train_batch_end {HERE}",
    "data": rf"ranks 0, 2 wait in the backward's all-reduce; rank 1 has not come: it is in the data loader {HERE}",
    "worker": rf"ranks 0, 2 wait in the backward's all-reduce; rank 1 has not come: it is in the data loader {HERE}",
    "stopped": r"ranks 0, 2 wait in the backward's all-reduce; rank 1 has not come: its process has not answered since "
    rf"\d\d:\d\d:\d\d UTC \(stopped, .*\); it was in training_step {HERE}",
    "rank 0": rf"ranks 1, 2 wait in the backward's all-reduce; rank 0 has not come: it is in training_step {HERE}",
    "rank 0 stopped": r"ranks 1, 2 wait in the backward's all-reduce; rank 0 has not come: its process has not answered",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_wait_and_the_one_that_does_not_come_are_named_once(case: str, reports: dict[str, str]) -> None:
    text = reports[case]
    assert len(re.findall("samestep: no progress for", text)) == 1, text
    assert re.match(rf"samestep: no progress for \d+ s at step [34]: {EXPECTED[case]}", text), text


def test_the_report_holds_the_stack_of_the_missing_rank_and_how_far_each_has_come(reports: dict[str, str]) -> None:
    stack = reports["lock"].splitlines()
    assert stack[1] == "  rank 1, the innermost call last:"
    assert any(re.fullmatch(r"    … \d+ calls in samestep and torch", line) for line in stack)
    assert any(line.endswith("in locks: lock.acquire()") for line in stack)
    counts = re.search(
        r"collectives begun in the training group \(flight recorder\): ranks 0, 2: (\d+), rank 1: (\d+)",
        reports["lock"],
    )
    if counts is not None:  # torch 2.11 may record nothing on gloo
        assert int(counts[1]) == int(counts[2]) + 1
    assert "ends when a collective has taken 60 s (the strategy's timeout)" in reports["lock"]


def test_each_rank_leaves_its_stacks_and_its_flight_recorder(folder: Path, reports: dict[str, str]) -> None:
    [dumps] = (folder / "sleep" / "run" / "hangs").iterdir()
    assert re.fullmatch(r"step-0000000[34]", dumps.name)
    for rank in range(3):
        stack = (dumps / f"stacks-{rank}.txt").read_text()
        assert "most recent call first" in stack
        assert ("in training_step" in stack) == ("in lingers" in stack) == (rank == 1)
        [group] = pickle.loads((dumps / f"flight-recorder-{rank}").read_bytes())["pg_status"].keys() & {"0"}
        assert group == "0"
    assert not (folder / "lock" / "run").exists()  # nothing is written where the run writes nothing
    assert "samestep: the run goes on, at step" in reports["sleep"]


def without_agent(folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    report_of(Path(folder), "training_step", 0, stops)


def test_where_the_store_does_not_answer_each_rank_speaks_for_itself(tmp_path: Path) -> None:
    """Rank 0 keeps the store itself, and is stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(without_agent, 3, str(tmp_path), port, timeout=120, join_group=False)
    text = printed(tmp_path)
    assert (tmp_path / "stderr-0").read_text() in ("", "samestep: the run goes on, at step 4.\n")
    assert re.match(
        r"samestep: no progress for \d+ s at step 3: rank [12] is in the backward's all-reduce, and the store through "
        "which the ranks tell where they are does not answer: the process that keeps it is stopped, or its host is gone",
        text,
    ), text


# --- what takes long and is no hang ----------------------------------------------------------


class Slow(ScalarWeight):
    """Takes its time wherever that is no fault: one rank prepares, compiles, saves and validates longer than the others."""

    def prepare_data(self) -> None:
        time.sleep(2 * LIMIT)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 and self.global_rank == 1:
            time.sleep(2 * LIMIT)  # the first step compiles
        if batch_idx == 3:
            time.sleep(1.5 * LIMIT)  # all ranks: nobody waits
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            time.sleep(LIMIT / 4)  # it moves, and the other waits for it

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            time.sleep(1.5 * LIMIT)


def train_slowly(folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (Path(folder) / f"stderr-{os.environ['RANK']}").open("w", buffering=1) as sys.stderr:
        trainer = quiet_trainer(max_epochs=1, hang_timeout=LIMIT, num_sanity_val_steps=0)
        trainer.fit(Slow(lr=0.01), DataLoader(torch.ones(2 * STEPS), 1), DataLoader(torch.ones(12), 1))
        trainer.save_checkpoint(Path(folder) / "checkpoint")


def test_what_takes_long_and_is_no_hang_is_not_called_one(tmp_path: Path) -> None:
    with_store(train_slowly, 2, tmp_path)
    assert printed(tmp_path) == ""


# --- ranks at different collectives, and the end ---------------------------------------------


class WaitsAlone(ScalarWeight):
    """One rank comes to a collective that the others never come to."""

    def on_fit_start(self) -> None:
        self.group = dist.new_group(backend="gloo")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STALLED and self.global_rank == 1:
            dist.barrier(self.group)


def wait_alone(folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (Path(folder) / f"stderr-{os.environ['RANK']}").open("w", buffering=1) as sys.stderr:
        trainer = quiet_trainer(max_epochs=1, hang_timeout=LIMIT, hang_action="exit")
        trainer.fit(WaitsAlone(lr=0.01), DataLoader(torch.ones(2 * STEPS), 1))


def test_ranks_at_different_collectives_are_named_and_ended_at_once_if_that_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        with_store(wait_alone, 2, tmp_path)
    assert "died with exit code 1" in str(error.value)
    assert re.findall(r"(?m)^rank \d", str(error.value)) == ["rank 0", "rank 1"]
    text = printed(tmp_path)
    assert re.match(
        r"samestep: no progress for \d+ s at step \d: the ranks wait for each other at different places: rank 0 in the "
        rf"(backward's all-reduce|collective 'control word') {HERE}, rank 1 in torch\.distributed\.barrier {HERE}\n",
        text,
    ), text
    assert "hang_action='exit': the run ends now." in text


class Sleeps(Callback):
    """Rank 1 does, for longer than any test takes, in the place of the case; or comes to a collective alone."""

    def __init__(self, case: str) -> None:
        self.case = case

    def sleep_in(self, place: str) -> None:
        if place == self.case and int(os.environ["RANK"]) == 1:
            time.sleep(600)

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STALLED:
            self.sleep_in("callback")
            if self.case == "save" and trainer.global_rank == 1:
                trainer.save_checkpoint(f"{trainer.default_root_dir}/alone")
            if self.case == "collectives":
                dist.barrier() if trainer.global_rank == 1 else dist.all_reduce(torch.ones(1), group=self.group)

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        self.group = dist.new_group(backend="gloo")

    def on_sanity_check_start(self, trainer: Any, task: Any) -> None:
        self.sleep_in("on_sanity_check_start")


class SleepingTask(ScalarWeight):
    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__(lr=0.01)
        self.sleeps = sleeps

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == STALLED:
            self.sleeps.sleep_in("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sleeps.sleep_in("sanity check" if self.trainer.sanity_checking else f"validation_step {batch_idx}")


def sleep(folder: str, port: int, case: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (Path(folder) / f"stderr-{os.environ['RANK']}").open("w", buffering=1) as sys.stderr:
        sleeps = Sleeps(case)
        trainer = quiet_trainer(
            max_epochs=1, hang_timeout=LIMIT, hang_action="report" if case in CERTAIN else "exit", default_root_dir=folder,
            callbacks=[sleeps], enable_checkpointing=True, val_check_interval=2,
        )  # fmt: skip
        data = StallingData(0, partial(sleeps.sleep_in, "dataset"))  # an index that rank 1 of 2 gets
        trainer.fit(SleepingTask(sleeps), DataLoader(data, 1), DataLoader(torch.ones(8), 1))


CERTAIN = ("save", "collectives")
SLEEPS = {
    "sanity check": "it is in validation_step",
    "on_sanity_check_start": "it is in on_sanity_check_start",
    "validation_step 0": "it is in validation_step",
    "validation_step 1": "it is in validation_step",
    "training_step": "it is in training_step",
    "callback": "it is in on_train_batch_end",
    "dataset": "it is in the data loader",
    "save": "the ranks wait for each other at different places: rank 0 in .*, rank 1 in ",
    "collectives": r"rank 0 in torch.distributed.all_reduce \(.*\), rank 1 in torch.distributed.barrier \(",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("sanity check", "save") else pytest.mark.slow) for case in SLEEPS]
)
def test_a_run_that_can_not_go_on_ends_as_hung_long_before_the_timeout(case: str, tmp_path: Path) -> None:
    """With hang_action="exit"; and without, where no rank can come any more."""
    with pytest.raises(RankError) as error:
        with_store(sleep, 2, tmp_path, case)
    # The one that sleeps can only be ended; the other one may hear of it first.
    ends = re.findall(
        r"(?m)^rank \d: died with exit code 1$|PeerError: rank \d ended the run: no progress", str(error.value)
    )
    assert len(ends) == 2, str(error.value)
    text = printed(tmp_path)
    assert len(re.findall("(?m)^samestep: no progress for", text)) == 1, text
    assert re.search(SLEEPS[case], text), text
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("hung", 1)
    assert f"samestep: {status['reason']}\n" in text


def test_a_frame_without_a_line_is_placed_at_its_function() -> None:
    code = test_a_frame_without_a_line_is_placed_at_its_function.__code__
    (line,) = stack_lines(cast("Any", SimpleNamespace(f_code=code, f_lineno=None, f_back=None)))
    assert line.startswith(f"{Path(__file__).name}:{code.co_firstlineno} in test_a_frame")


def test_a_watch_goes_on_after_an_error_of_its_own_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []

    def fails(frame: Any, *, idle: bool) -> Any:
        looks.append(1)
        raise ValueError("an odd stack")

    monkeypatch.setattr(watch, "whereabouts", fails)
    trainer: Any = SimpleNamespace(global_rank=0, world_size=1)
    one = watch.HangWatch(trainer, cast("Any", None), dist.HashStore(), 0.1, exits=False)
    one.start()
    deadline = time.monotonic() + 20
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    one.stop()
    assert len(looks) >= 3
    assert capsys.readouterr().err == (
        "samestep: the hang watch of rank 0 could not look at the run, and goes on: ValueError: an odd stack\n"
    )


# --- the judgement alone ---------------------------------------------------------------------


def beat(rank: int, waits: str = "", age: float = 20.0, **more: Any) -> Beat:
    return Beat(**{
        "rank": rank, "number": 7, "told": 0.0, "age": age, "step": 41, "where": "training_step (train.py:31)",
        "waits": waits, "patience": 10.0, "long": 300.0, **more,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("beats", "said"),
    [
        # A rank that moved lately is slow, and one with more patience (it compiles, or always took that long) is, too.
        ([beat(0, "A"), beat(1, age=3.0)], None),
        ([beat(0, "A"), beat(1, patience=60.0)], None),
        ([beat(0, "A", age=5.0), beat(1)], None),
        ([beat(0, "A"), beat(1)], "rank 0 waits in A; rank 1 has not come: it is in training_step (train.py:31)"),
        (
            [beat(0, "A"), beat(1), beat(2, "A"), beat(3), beat(4, "B")],
            "ranks 0, 2 wait in A, rank 4 waits in B; ranks 1, 3 have not come: they are in training_step (train.py:31)",
        ),
        # All in the same collective, or nobody in one: only much later.
        ([beat(0, "A"), beat(1, "A")], None),
        ([beat(0), beat(1)], None),
        ([beat(0, "A", age=301), beat(1, "A", age=301)], "all ranks wait in A: the network is slow, or has lost a message"),
        ([beat(0, age=301), beat(1, age=301)], "no rank waits for another: ranks 0, 1 are in training_step (train.py:31)"),
        # In different ones: at once.
        (
            [*(beat(rank, "A") for rank in range(4)), beat(4, "B")],
            "the ranks wait for each other at different places: ranks 0-3 in A (train.py:31), rank 4 in B (train.py:31)",
        ),
        (
            [beat(0, "A"), beat(1, "A", silent=9.0)],
            "rank 0 waits in A; rank 1 has not come: its process has not answered since 00:00:00 UTC (stopped, swapped "
            "out, held up in native code, or its host is gone); it was in A",
        ),
    ],
)  # fmt: skip
def test_judgement(beats: list[Beat], said: str | None) -> None:
    hang = judge(beats, silence=5.0)
    assert (hang and hang.headline.partition(" at step 41: ")[2]) == said
