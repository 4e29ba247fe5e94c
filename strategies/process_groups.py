"""Joining and leaving the process groups: one for training, one for everything said on the side."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .environment import Environment

# Counts the groups this process has joined, so that a second fit after a teardown does not read
# the addresses the first one left in the same store.
_joined = itertools.count()


@dataclass
class ProcessGroups:
    """The groups of one run.

    `training` carries gradients, on the backend of the device. `control` is always gloo, on CPU:
    flags, names and decisions travel there, so they never wait behind a gradient or touch the device.
    """

    training: dist.ProcessGroup
    control: dist.ProcessGroup
    store: dist.Store
    """Where ranks tell which collective they come to."""

    _number: itertools.count[int] = field(default_factory=itertools.count)
    _watched: itertools.count[int] = field(default_factory=itertools.count)

    def announce(self, name: str) -> None:
        """Come to the next collective of the main thread; the first rank that does tells its name.

        Gloo itself takes any two collectives for the same one: it hangs, aborts the process, or mixes the values.

        Raises:
            RuntimeError: another rank came to another collective.
        """
        if dist.get_world_size() == 1 or threading.current_thread() is not threading.main_thread():
            return
        number = next(self._number)
        mine = f"{name} (rank {dist.get_rank()})"
        try:
            first = self.store.compare_set(str(number), "", mine).decode()
            if dist.get_rank() == 0 and number >= _KEPT:
                self.store.delete_key(str(number - _KEPT))
        except dist.DistError:
            return  # whoever keeps the store has ended: the collective will say so
        if first.rpartition(" (")[0] != name:
            raise RuntimeError(
                f"the ranks are at different places, and would wait for each other: {first} and {mine}. What communicates "
                "(save_checkpoint, all_gather, validate, …) must be called by every rank: not under "
                "`if trainer.is_global_zero:`."
            )

    def store_of_watch(self) -> dist.Store:
        """A part of the store for the next run's watchers, with a connection of its own: the main thread may block one."""
        store: Any = dist.PrefixStore(f"watch_{next(self._watched)}", self.store)
        return store.clone() if hasattr(store, "clone") else store  # torch 2.11 has none

    def let_go(self) -> None:
        """Drop the groups, whoever still holds this object: a group ends its threads when nobody refers to it."""
        del self.training, self.control


# Names of collectives that stay in the store. No rank is ever so far behind: each collective waits for all.
_KEPT = 100

_groups: ProcessGroups | None = None
_opened = False
_abandoned = False


def join(environment: Environment, device: torch.device, timeout: timedelta) -> ProcessGroups:
    """Join the groups of this job; a second call returns the ones already joined.

    A default process group that the caller initialized is used as it is, and left alone at the end.

    Raises:
        RuntimeError: MASTER_ADDR or MASTER_PORT is missing, or the peers can't be reached in
            `timeout` (gloo waits up to five times as long for the last connection).
    """
    global _groups, _opened, _abandoned
    _abandoned = False
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
        _opened = True
    atexit.register(leave)
    training = dist.group.WORLD
    assert training is not None
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportAssignmentType]
    store: dist.Store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    place = f"attempt_{environment.restart}/collectives_{next(_joined)}"
    _groups = ProcessGroups(training, control, dist.PrefixStore(place, store))
    return _groups


def leave() -> None:
    """Close the groups that `join` opened, and no others; nothing happens when there are none.

    Waits until gloo's threads are done. One that wakes up while Python finalizes, to free the tensors of a
    collective, finds no interpreter, and the process of a run that succeeded ends with SIGABRT.
    """
    global _groups, _opened
    groups, _groups = _groups, None
    atexit.unregister(leave)
    if groups is None:
        return
    if dist.is_initialized() and groups.training is dist.group.WORLD:
        dist.destroy_process_group(None if _opened else groups.control)
    _opened = False
    if not _abandoned:
        groups.let_go()


def abandon() -> None:
    """Let `leave` not wait: this rank failed with a collective in flight, to which the others may never come."""
    global _abandoned
    _abandoned = True


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
