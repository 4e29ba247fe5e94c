"""`end_ranks`: let ranks end as they will, and see how each did."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from run_ranks import _context  # the server that has imported torch already


@dataclass
class Ended:
    """How a rank ended."""

    exit_code: int | None
    """Negative: by this signal. None: it had to be killed, because it did not end in time."""
    told: str
    """What it wrote to stderr."""
    at: float
    """Seconds, on a clock that all ranks of a call share."""


def end_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, faults: str = "", timeout: float = 60.0
) -> list[Ended]:
    """Call `function(*args)` on ranks that meet as under torchrun, with `faults` in SAMESTEP_CHAOS.

    The store is this process's, as it is the agent's under torchrun: it outlives every rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = Path(tempfile.mkdtemp(prefix="ending-"))
    processes: list[Any] = []
    codes: dict[int, tuple[int | None, float]] = {}
    try:
        for rank in range(world_size):
            place = (rank, world_size, store.port, faults, os.getcwd())
            process = _context.Process(target=_rank, args=(function, args, folder / str(rank), *place))
            process.start()
            processes.append(process)
        deadline = time.monotonic() + timeout
        while len(codes) < world_size and time.monotonic() < deadline:
            for rank, process in enumerate(processes):
                if rank not in codes and process.exitcode is not None:
                    codes[rank] = process.exitcode, time.monotonic()
            time.sleep(0.02)
        return [
            Ended(*(codes.get(rank, (None, time.monotonic()))[:1]), (folder / str(rank)).read_text(), codes.get(rank, (None, deadline))[1])
            for rank in range(world_size)
        ]  # fmt: skip
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()  # also one that was stopped
            process.join()
            process.close()
        shutil.rmtree(folder)


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], told: Path, rank: int, world_size: int, port: int, faults: str,
    folder: str,
) -> None:  # fmt: skip
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    file = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SAMESTEP_CHAOS": faults,
    }
    try:
        function(*args)
    finally:
        from samestep.strategies import process_groups

        process_groups._depart()  # pyright: ignore[reportPrivateUsage]  # exit handlers don't run in such a process
