"""How ranks come to be: torchrun's environment, and `devices=N` without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
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


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": os.getcwd(),
            **environment,
        },
    )


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


def test_the_parent_checks_before_it_starts_anything(program: Path) -> None:
    done = run(
        sys.executable, "-c", "from samestep.trainer import Trainer; Trainer(devices=2, strategy='single_device')"
    )
    assert done.returncode == 1
    assert "strategy='single_device' (SingleDeviceStrategy) on 2 processes" in done.stderr


def test_a_prompt_can_not_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (FULL, {"devices": 3}, "devices=3, but torchrun started 2 processes"),
        (FULL, {"num_nodes": 3}, "num_nodes=3, but torchrun started 2"),
        ({}, {"num_nodes": 2}, "num_nodes=2 without torchrun"),
        (FULL, {"strategy": "single_device"}, r"strategy='single_device' \(SingleDeviceStrategy\) on 4 processes"),
        (FULL, {"sync_batchnorm": True}, "sync_batchnorm=True on cpu is not supported yet"),
        ({}, {"sync_batchnorm": True, "devices": 2}, "sync_batchnorm=True on cpu is not supported yet"),
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
    assert found.find_unused_parameters
