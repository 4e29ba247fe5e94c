"""How ranks come to be: torchrun's environment, and `devices=N` without torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from samestep.strategies import DDPStrategy, Environment
from samestep.strategies.launch import own_command
from tasks import Regression, loader, quiet_trainer

PROGRAM = """
import sys
from tasks import Regression, loader, parameters_of, quiet_trainer

class Fails(Regression):
    def training_step(self, batch, batch_idx):
        if "fail" in sys.argv and self.global_rank == 1 and batch_idx == 2:
            raise ValueError("rank 1 has a problem")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    devices = 2 if "launch" in sys.argv else "auto"
    trainer = quiet_trainer(max_epochs=1, precision=64, devices=devices, seed=1)
    task = Fails()
    trainer.fit(task, loader(32, 4))
    trainer.test_of_ranks = trainer.strategy.gather_objects(parameters_of(task).sum().item(), name="test")
    trainer.print("ranks", trainer.world_size, "equal", len(set(trainer.test_of_ranks)) == 1, "arguments", *sys.argv[1:])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def environment_of_tests(**more: str) -> dict[str, str]:
    tests = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1", "TMPDIR": os.getcwd(), **more}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment_of_tests(**environment))


def test_devices_above_one_start_the_same_program_again(program: Path) -> None:
    done = run(sys.executable, str(program), "launch", "x=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks 2 equal True arguments launch x=1\n"


def test_torchrun(program: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run(*torchrun, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks 2 equal True arguments\n"


def test_a_rank_that_fails_ends_all_and_is_named(program: Path) -> None:
    done = run(sys.executable, str(program), "launch", "fail")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "samestep: rank 1 failed first, with exit code 1: ValueError: rank 1 has a problem"
    )
    assert "ValueError: rank 1 has a problem" in done.stderr


OUTSIDE_OF_FIT = """
import sys, time
import torch.distributed as dist
from tasks import DataLoader, ScalarWeight, quiet_trainer, torch

def early(rank):
    if sys.argv[1] == "before" and rank == 1:
        raise ValueError("rank 1 has bad data")

if __name__ == "__main__":
    import os
    early(int(os.environ.get("RANK", -1)))
    trainer = quiet_trainer(max_epochs=1, devices=2)
    trainer.fit(ScalarWeight(), DataLoader(torch.ones(8), 1))
    rank = trainer.global_rank
    if sys.argv[1] == "after" and rank == 1:
        raise ValueError("rank 1 has a problem\\nin two lines")
    if sys.argv[1] == "exit" and rank == 1:
        sys.exit(7)
    if sys.argv[1] == "kill" and rank == 1:
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "usage":
        sys.exit(2)
    trainer.strategy.barrier(name="the end")
    time.sleep(30 if sys.argv[1] != "good" else 0)
"""


@pytest.mark.parametrize(
    ("how", "status", "last"),
    [
        ("good", 0, ""),
        ("before", 1, "samestep: rank 1 failed first, with exit code 1: ValueError: rank 1 has bad data"),
        ("after", 1, "samestep: rank 1 failed first, with exit code 1: ValueError: rank 1 has a problem"),
        ("exit", 7, "samestep: rank 1 failed first, with exit code 7"),
        ("kill", 137, "samestep: rank 1 failed first, with exit code -9: Signal 9 (SIGKILL) received by PID"),
        ("usage", 2, "with exit code 2"),
    ],
)
def test_the_end_of_a_rank_outside_of_fit(how: str, status: int, last: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OUTSIDE_OF_FIT)
    done = run(sys.executable, str(program), how)
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines() or [""]
    assert last in lines[-1]
    assert not any("torch.distributed.elastic" in line or "no error file" in line for line in lines), done.stderr


def test_torchrun_shows_the_cause_and_not_its_consequence(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OUTSIDE_OF_FIT)
    done = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), "after"
    )
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause")[2]
    assert "ValueError: rank 1 has a problem" in root
    assert "rank      : 1" in root


INTERRUPTED = """
from tasks import DataLoader, ScalarWeight, quiet_trainer, torch

class Endless(ScalarWeight):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 0:
            print("running", flush=True)

if __name__ == "__main__":
    quiet_trainer(max_epochs=-1, devices=2).fit(Endless(), DataLoader(torch.ones(100_000), 1))
"""


def test_ctrl_c_ends_all_ranks_in_a_few_lines(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment_of_tests(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, errors
    lines = errors.splitlines()
    assert lines[-1] == "samestep: SIGINT received, all ranks are stopped"
    assert len(lines) <= 5, errors


UNGUARDED = """
from tasks import DataLoader, ScalarWeight, quiet_trainer, torch

data = DataLoader(torch.ones(8), 1, num_workers=1, multiprocessing_context="METHOD")
quiet_trainer(max_epochs=1, devices=RANKS).fit(ScalarWeight(), data)
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_imports_the_program_does_not_begin_the_run_anew(method: str, ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED.replace("METHOD", method).replace("RANKS", str(ranks)))
    done = run(sys.executable, str(program))
    assert done.returncode == 1
    assert "fit in a child process" in done.stderr
    assert 'call it under `if __name__ == "__main__":`' in done.stderr
    if ranks > 1:
        assert "fit in a child process" in done.stderr.splitlines()[-1]


def test_the_parent_checks_before_it_starts_anything(program: Path) -> None:
    done = run(
        sys.executable, "-c", "from samestep.trainer import Trainer; Trainer(devices=2, strategy='single_device')"
    )
    assert done.returncode == 1
    assert "strategy='single_device' (SingleDeviceStrategy) on 2 processes" in done.stderr


def test_a_prompt_can_not_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a worker of pytest has none
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    with pytest.raises(RuntimeError, match="this process has no program"):
        own_command()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "package", "x=1"])
    assert own_command() == [sys.executable, "-m", "package", "x=1"]


FULL = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_the_environment_is_read() -> None:
    environment = Environment.read({**FULL, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert environment == Environment(1, 1, 4, 2, 3, True)
    assert environment.num_nodes == 2
    assert Environment.read({}) == Environment()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "LOCAL_RANK=1, WORLD_SIZE=4 set, but RANK not"),
        ({"WORLD_SIZE": None}, "RANK=1, LOCAL_RANK=1 set, but WORLD_SIZE not"),
        ({"LOCAL_RANK": None, "RANK": None}, "WORLD_SIZE=4 set, but RANK, LOCAL_RANK not.*unset WORLD_SIZE"),
        ({"RANK": "4"}, "RANK=4: expected 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2: expected 0 to 1"),
        ({"RANK": "one"}, "RANK='one': expected a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(change: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in {**FULL, **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=message):
        Environment.read(variables)


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE=2 set, but RANK, LOCAL_RANK not"),
        (FULL, {"devices": 3}, "devices=3, but this program runs as 2 processes on this host, started by torchrun or"),
        (FULL, {"num_nodes": 3}, "num_nodes=3, but torchrun started 2"),
        ({}, {"num_nodes": 2}, "num_nodes=2 without torchrun"),
        (FULL, {"strategy": "single_device"}, r"strategy='single_device' \(SingleDeviceStrategy\) on 4 processes"),
    ],
)
def test_options_against_the_environment(
    variables: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RuntimeError), match=message):
        quiet_trainer(**options)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MASTER_ADDR is not set, but WORLD_SIZE=2"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a port"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_a_missing_master_is_named_before_anybody_waits(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        quiet_trainer(max_epochs=1).fit(Regression(), loader(8, 4))


def test_ddp_on_one_process_needs_no_environment() -> None:
    done = run(
        sys.executable,
        "-c",
        "from tasks import *\n"
        "task = ScalarWeight(); trainer = quiet_trainer(max_epochs=1, strategy='ddp')\n"
        "trainer.fit(task, DataLoader(torch.ones(3), 1)); print(task.w.item(), trainer.strategy.name)",
    )
    assert done.stdout == "-2.0 ddp\n", done.stderr
    assert done.stderr == ""


def test_detail_debugging_is_refused_on_gloo() -> None:
    done = run(
        sys.executable,
        "-c",
        "from tasks import *\nquiet_trainer(max_epochs=1, strategy='ddp').fit(ScalarWeight(), DataLoader(torch.ones(3), 1))",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert done.returncode == 1
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on gloo" in done.stderr


def test_ddp_inside_the_task_is_refused() -> None:
    done = run(
        sys.executable,
        "-c",
        "from tasks import *\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "task = Regression(); task.net = torch.nn.parallel.DistributedDataParallel(task.net)\n"
        "quiet_trainer(max_epochs=1, strategy='ddp').fit(task, loader(8, 4))",
    )
    assert "the task holds a DistributedDataParallel already" in done.stderr


def test_a_strategy_object_keeps_its_arguments() -> None:
    strategy = DDPStrategy(bucket_cap_mb=3, find_unused_parameters=True)
    assert quiet_trainer(strategy=strategy).strategy is strategy
    found = quiet_trainer(strategy="ddp_find_unused_parameters_true").strategy
    assert isinstance(found, DDPStrategy)
    assert found.arguments.find_unused_parameters


# --- meeting ---------------------------------------------------------------------------------


def meet_alone(rank: int, more: dict[str, str]) -> Any:
    """This process as one rank of two, of which the other never comes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **more}
    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    return quiet_trainer(max_epochs=1, strategy=strategy).fit(Regression(), loader(8, 4))


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.strategies.meeting._SAID_AFTER", 0.5)
    with pytest.raises(
        RuntimeError, match=r"rank 0 has waited 2 s for the other ranks; missing: 1\. Their own messages"
    ):
        meet_alone(0, {"MASTER_PORT": str(free_port())})


def test_a_master_that_nobody_reaches_is_named_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("samestep.strategies.meeting._SAID_AFTER", 0.5)
    port = free_port()
    with pytest.raises(RuntimeError, match=rf"rank 1 can't reach MASTER_ADDR=127.0.0.1 MASTER_PORT={port} for 2 s"):
        meet_alone(1, {"MASTER_PORT": str(port)})
    assert "Connection refused. It is rank 0's host" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"MASTER_PORT={port} is taken on this host"):
            meet_alone(0, {"MASTER_PORT": str(port)})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# --- signals ---------------------------------------------------------------------------------

SIGNALLED = """
from samestep.callbacks import ModelCheckpoint
from tasks import *

if __name__ == "__main__":
    keep = ModelCheckpoint(every_n_train_steps=10**9)
    trainer = quiet_trainer(max_epochs=-1, devices=2, enable_checkpointing=True, callbacks=[keep], default_root_dir="run")
    trainer.fit(ScalarWeight(), DataLoader(torch.ones(100_000), 1))
"""


@pytest.mark.parametrize(
    ("faults", "status", "last"),
    [
        ("term rank=1 step=5", 143, "samestep: all ranks ended: SIGTERM received (epoch 0, step "),
        ("term rank=1 step=5 to=launcher", 143, "samestep: SIGTERM received, all ranks are stopped"),
        ("kill rank=1 step=5 to=launcher", -9, ""),
    ],
)
def test_a_signal_to_a_rank_or_to_the_launcher_ends_all_and_saves(
    faults: str, status: int, last: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(SIGNALLED)
    # Returns when the last of all processes has closed its end of the pipes.
    done = run(sys.executable, "program.py", SAMESTEP_CHAOS=faults)
    assert done.returncode == status, done.stderr
    told = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (told["status"], told["exit_code"]) == ("preempted", 143)
    (saved,) = [folder for folder in (tmp_path / "run" / "checkpoints").iterdir() if not folder.name.startswith(".")]
    assert saved.name == f"step-{told['step']:08d}"
    assert str(saved.name) in told["reason"]
    assert last in done.stderr.splitlines()[-1]
