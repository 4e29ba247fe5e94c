"""`run_ranks`: call a function on several ranks, each a process of its own, and return what each returned.

Processes are forked from a server that has imported torch already, so that two ranks start in a tenth of a second.
They meet through a file in a temporary folder: no port is taken.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, TypeVar

T = TypeVar("T")

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torchmetrics", "samestep.trainer", "samestep.callbacks"])


class RankError(AssertionError):
    """One or more ranks failed; the message holds every rank's traceback."""


def run_ranks(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, join_group: bool = True
) -> list[T]:
    """Call `function(*args)` on `world_size` ranks.

    Args:
        function: defined at the top of a module.
        world_size: number of processes.
        args: what can be pickled.
        timeout: seconds after which all processes are killed.
        join_group: initialize torch.distributed before the call.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        RankError: a rank raised, died, or did not finish in time.
    """
    folder = tempfile.mkdtemp(prefix="ranks-")
    processes: list[Any] = []
    receivers: list[Any] = []
    outcomes: dict[int, tuple[bool, Any]] = {}
    try:
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(sender, function, args, rank, world_size, folder, join_group, timeout)
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        deadline = time.monotonic() + timeout
        open_receivers = dict(zip(receivers, range(world_size), strict=True))
        while open_receivers and (left := deadline - time.monotonic()) > 0:
            for receiver in wait(list(open_receivers), timeout=left):
                rank = open_receivers.pop(receiver)
                try:
                    outcomes[rank] = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    outcomes[rank] = (False, f"died with exit code {processes[rank].exitcode}")
            if any(not good for good, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + 15)  # its peers may have something to say, too
        for rank in open_receivers.values():
            outcomes[rank] = (False, "did not finish in time")
    finally:
        for process in processes:
            process.join(5 if len(outcomes) == world_size else 0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for receiver in receivers:
            receiver.close()
        shutil.rmtree(folder, ignore_errors=True)
    if any(not good for good, _ in outcomes.values()):
        raise RankError(
            "\n".join(f"rank {rank}: {what}" for rank, (good, what) in sorted(outcomes.items()) if not good)
        )
    return [outcomes[rank][1] for rank in range(world_size)]


def errors_of_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[str]:
    """The message of the exception that each rank raised; every rank must raise one."""
    errors = run_ranks(_error_of, world_size, function, args, timeout=timeout)
    assert all(errors), f"some ranks raised nothing: {errors}"
    return [error for error in errors if error]


def _error_of(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _rank(
    sender: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: str,
    join_group: bool,
    timeout: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    try:
        if join_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/meet",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that is done early must not leave while others still connect
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Pickled here: a tensor sent through the pipe itself would stay in this process's shared memory.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    if dist.is_initialized() and outcome[0]:
        dist.destroy_process_group()
