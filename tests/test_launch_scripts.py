"""The scripts of examples/launch, run as they stand: on two CPU ranks, and on two hosts that are one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from samestep.trainer import TrainerConfig, from_command_line

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "examples" / "launch"
PROGRAM = """
import torch
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import Trainer, TrainerConfig, from_command_line
from dataclasses import dataclass, field
from tasks import ScalarWeight, quiet_trainer
from torch.utils.data import DataLoader

@dataclass
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False))
    ckpt_path: str | None = None
    samples: int = 8

class Slow(ScalarWeight):
    def training_step(self, batch, batch_idx):
        open("step", "w").close()
        import time; time.sleep(0.05)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    options = from_command_line(Options())
    trainer = Trainer(options.trainer, callbacks=[ModelCheckpoint(every_n_train_steps=4)])
    trainer.fit(Slow(), DataLoader(torch.ones(options.samples), 1), ckpt_path=options.ckpt_path)
    trainer.print("ranks", trainer.world_size, "steps", trainer.global_step, flush=True)
"""

pytestmark = pytest.mark.timeout(240)


def environment(**more: str) -> dict[str, str]:
    """With this Python's torchrun, and the tests' tasks."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "PROCESSES": "2", **more,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _program() -> None:
    Path("program.py").write_text(PROGRAM)


@pytest.mark.slow
def test_one_node_starts_ranks_again_that_die() -> None:
    done = subprocess.run(
        [LAUNCH / "one_node.sh", "program.py", "ckpt_path=auto", "trainer.default_root_dir=run"],
        env=environment(SAMESTEP_CHAOS="kill rank=1 step=2 restart=0"), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ranks 2 steps 4" in done.stdout


@pytest.mark.slow
def test_many_nodes_meet_at_the_head_and_again_when_a_rank_has_died() -> None:
    """Only one of the agents counts the restart. The run finds its folder all the same."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = environment(
        HEAD="localhost",
        NODES="2",
        PORT=str(port),
        PROCESSES="1",
        JOB="two-nodes",
        SAMESTEP_CHAOS="kill rank=1 step=9 restart=0",
    )
    command = [LAUNCH / "many_nodes.sh", "program.py", "ckpt_path=auto", "samples=40"]
    nodes = [
        subprocess.Popen(command, env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("resuming from runs/" in out and "ranks 2 steps 20" in out for out, _ in said) == 1, (
        said
    )  # on the node that has rank 0


def test_scripts_without_a_program_say_how_to_use_them() -> None:
    for script, names in (
        ("one_node.sh", ["RESTARTS"]),
        ("many_nodes.sh", ["HEAD=", "NODES"]),
        ("slurm.sbatch", ["sbatch"]),
    ):
        done = subprocess.run([LAUNCH / script], env=environment(), capture_output=True, text=True, timeout=20)
        assert done.returncode == 2
        assert all(name in done.stderr for name in names), done.stderr
        assert not any(line.startswith("#") for line in done.stderr.splitlines())


@pytest.mark.slow
def test_a_slurm_job_saves_and_queues_itself_again_and_goes_on(tmp_path: Path) -> None:
    """`srun` runs its command here, and `scontrol` notes what it is told, or names this host."""
    Path("bin").mkdir()
    for name, body in (
        ("srun", 'exec "$@"'),
        ("scontrol", 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi'),
    ):
        (Path("bin") / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (Path("bin") / name).chmod(0o755)
    with socket.socket() as free:  # the script's own port may be taken here
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = (LAUNCH / "slurm.sbatch").read_text("utf-8").replace(":29400", f":{port}")
    Path("job.sbatch").write_text(script)
    where = environment(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="localhost", SLURM_JOB_NUM_NODES="1")
    where["PATH"] = f"{os.getcwd()}/bin{os.pathsep}{where['PATH']}"
    command = ["bash", "job.sbatch", "program.py", "ckpt_path=auto", "samples=40"]

    job = subprocess.Popen(command, env=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not Path("step").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert "queued again" in said
    assert Path("requeued").read_text() == "requeue 7\n"
    status: dict[str, Any] = json.loads(Path("runs/slurm-7/status.json").read_text())
    assert status["status"] == "preempted"
    assert 0 < status["step"] < 20

    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"step {status['step']}" in done.stdout, "it says from where it goes on"
    assert "ranks 2 steps 20" in done.stdout
    assert Path("requeued").read_text() == "requeue 7\n", "only once"


def test_the_job_of_kubernetes_gives_the_example_options_that_it_has() -> None:
    import yaml

    job: dict[str, Any] = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text("utf-8"))
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    container = pod["containers"][0]
    program, *arguments = container["command"][1:]
    assert container["command"][0] == "torchrun"
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        options: Any = from_command_line(__import__(Path(program).stem).Options(), arguments)
    finally:
        sys.path.pop(0)
    assert isinstance(options.trainer, TrainerConfig)
    assert (options.ckpt_path, options.trainer.default_root_dir) == ("auto", "/runs/char-gpt")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    seconds = {each["name"]: int(each["value"]) for each in container["env"]}
    assert seconds["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] < pod["terminationGracePeriodSeconds"]
