"""Joining and leaving the process groups: one for training, one for everything said on the side."""

from __future__ import annotations

import atexit
import itertools
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .environment import Environment

# Counts the groups this process has joined, so that a second fit after a teardown does not read
# the addresses the first one left in the same store.
_joined = itertools.count()


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of one run.

    `training` carries gradients, on the backend of the device. `control` is always gloo, on CPU:
    flags, names and decisions travel there, so they never wait behind a gradient or touch the device.
    """

    training: dist.ProcessGroup
    control: dist.ProcessGroup


_groups: ProcessGroups | None = None


def join(environment: Environment, device: torch.device, timeout: timedelta) -> ProcessGroups:
    """Join the groups of this job; a second call returns the ones already joined.

    A default process group that the caller initialized is used as it is, and left alone at the end.

    Raises:
        RuntimeError: MASTER_ADDR or MASTER_PORT is missing, or the peers can't be reached in
            `timeout` (gloo waits up to five times as long for the last connection).
    """
    global _groups
    if _groups is not None and dist.is_initialized():
        return _groups
    if dist.is_initialized():
        if dist.get_world_size() != environment.world_size or dist.get_rank() != environment.rank:
            raise RuntimeError(
                f"the process group already initialized has rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but RANK={environment.rank} and WORLD_SIZE={environment.world_size}: initialize it from "
                "these variables, or leave it to Samestep."
            )
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
            # The wrapper that DETAIL puts around gloo crashes (SIGSEGV) in DDP's constructor.
            raise RuntimeError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on gloo: use INFO instead."
            )
        dist.init_process_group(
            backend,
            store=_store(environment, timeout),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        atexit.register(leave)
    training = dist.group.WORLD
    assert training is not None
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportAssignmentType]
    _groups = ProcessGroups(training, control)
    return _groups


def leave() -> None:
    """Close the groups that `join` opened; nothing happens when there are none."""
    global _groups
    _groups = None
    atexit.unregister(leave)
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(environment: Environment, timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other, fresh for every restart.

    torchrun re-uses one store for all its restarts: without the prefix, gloo reads the addresses
    of processes that are dead, and fails or hangs.
    """
    number = next(_joined)
    if environment.world_size == 1 and not os.environ.get("MASTER_ADDR"):
        return dist.PrefixStore(f"group_{number}", dist.HashStore())
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise RuntimeError(
                f"{name} is not set, but WORLD_SIZE={environment.world_size}: the ranks can't find each other. "
                "torchrun sets it; by hand, give every process the address and a free port of rank 0's host."
            )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise RuntimeError(f"MASTER_PORT={port!r}: expected a port number, 1 to 65535.")
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(port),
        environment.world_size,
        is_master=environment.rank == 0 and not agent_hosts_it,
        timeout=timeout,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"attempt_{environment.restart}/group_{number}", store)
