"""How the program is started: a command line, or a function."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...strategies import launch_function
from .check import Start
from .probe import VARIABLE


def command_starter(command: Sequence[str], devices: int | None, timeout: float) -> Start:
    """Starts a Python program with arguments, on `devices` ranks under torchrun; None: as it starts by itself."""
    launcher: list[str] = []
    if devices is not None and devices > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]

    def start(plan: Path, log: Path) -> int:
        environment = {"OMP_NUM_THREADS": "1" if launcher else "", **os.environ, VARIABLE: str(plan)}
        environment = {name: value for name, value in environment.items() if value}
        with open(log, "wb") as output:
            program = subprocess.Popen(
                [sys.executable, *launcher, *command], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                return program.wait(timeout)
            except subprocess.TimeoutExpired:
                print(f"verify-resume: not done in {timeout:g} s, ended", file=sys.stderr)
                return -signal.SIGALRM
            finally:
                with contextlib.suppress(ProcessLookupError):  # its own group: also what it has started
                    os.killpg(program.pid, signal.SIGKILL)
                program.wait()

    return start


def function_starter(train: Callable[[], None], processes: int) -> Start:
    """Starts a function in new processes."""
    # They are forked from a server, which imports torch once instead of each of them.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["samestep.trainer", "torch._dynamo"])

    def start(plan: Path, log: Path) -> int:
        try:
            launch_function(_follow, processes, train, str(plan))
        except Exception as error:
            log.write_text(f"{type(error).__name__}: {error}", "utf-8")
            return 1
        return 0

    return start


def _follow(train: Callable[[], None], plan: str) -> None:
    os.environ[VARIABLE] = plan  # here, since a fork server does not see what is set later
    train()
