"""Joining and leaving the process groups: one for training, one for everything said on the side."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .environment import Environment
from .first_cause import End, FirstCause, has_timed_out
from .meeting import depart, departures_before_meeting, departures_of, meet, store_of_job

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
    departures: dist.Store
    """Where ranks note that they have left the program."""
    cause: FirstCause = field(init=False)
    """What the ranks tell each other about the end of the run."""

    checkpoints: dist.ProcessGroup | None = None
    """For the thread that writes checkpoints, gloo; made when it is needed."""

    _runs: itertools.count[int] = field(default_factory=itertools.count)
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

    def begin_run(self) -> None:
        """A run begins, on all ranks: what was told about the end of the one before does not count any more."""
        store = dist.PrefixStore(f"run_{next(self._runs)}", self.store)
        self.cause = FirstCause(store, self.departures, dist.get_rank(), dist.get_world_size())

    def for_checkpoints(self, timeout: timedelta) -> dist.ProcessGroup:
        """The group of the thread that writes checkpoints. All ranks come here together, in the main thread.

        Two threads that use one gloo group get each other's values.
        """
        if self.checkpoints is None:
            self.checkpoints = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportAttributeAccessIssue]
        assert self.checkpoints is not None
        return self.checkpoints

    def let_go(self) -> None:
        """Drop the groups, whoever still holds this object: a group ends its threads when nobody refers to it."""
        del self.training, self.control, self.checkpoints


# Names of collectives that stay in the store. No rank is ever so far behind: each collective waits for all.
_KEPT = 100

_groups: ProcessGroups | None = None
_departures: dist.Store | None = None
_opened = False
_abandoned = False
_started_again = False


def join(environment: Environment, device: torch.device, timeout: timedelta) -> ProcessGroups:
    """Join the groups of this job; a second call returns the ones already joined.

    A default process group that the caller initialized is used as it is, and left alone at the end.

    Raises:
        RuntimeError: MASTER_ADDR or MASTER_PORT is missing, or peers don't come in `timeout`; the message names those
            missing. Once all are there, gloo waits up to five times as long for a connection.
    """
    global _groups, _departures, _opened, _abandoned, _started_again
    _abandoned = False
    if _groups is not None and dist.is_initialized():
        _groups.begin_run()
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
        job = store_of_job(environment, timeout)
        meeting, number = meet(job, _departures or departures_before_meeting(job, environment), environment, timeout)
        _started_again = _started_again or (_departures is None and number > 1)
        _departures = departures_of(meeting)
        dist.init_process_group(
            backend,
            store=meeting,
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
    _groups = ProcessGroups(training, control, dist.PrefixStore(place, store), _departures or departures_of(store))
    _groups.begin_run()
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
        for group in (None,) if _opened else filter(None, (groups.control, groups.checkpoints)):
            dist.destroy_process_group(group)
    _opened = False
    if not _abandoned:
        groups.let_go()


def started_again() -> bool:
    """Whether torchrun had ranks before that met in the same store: also where this host's agent has counted no restart."""
    return _started_again


def tell_end(end: End) -> End:
    """Tell the peers how this rank ends the run; return the end that was told first, by whichever rank."""
    return end if _groups is None else _groups.cause.tell(end)


def end_of_peers(error: BaseException, *, in_haste: Callable[[], bool]) -> End | None:
    """What lies behind an error that only says that another rank has ended or did not come; None: nobody knows.

    `in_haste`: asked while this rank waits for word, whether its launcher ends it.
    """
    if _groups is None:
        return None
    return _groups.cause.of_peers(timed_out=has_timed_out(error), in_haste=in_haste)


def depart_at_exit() -> None:
    """Let this process, if torch's agent started it as a rank, tell ranks that wait for it when its program ends."""
    # A program that a rank starts inherits its environment, but is no rank.
    is_rank = os.environ.get("TORCHELASTIC_RUN_ID") and multiprocessing.parent_process() is None
    if is_rank and os.environ.setdefault("SAMESTEP_RANK_PROCESS", str(os.getpid())) == str(os.getpid()):
        atexit.register(_depart)


def _depart() -> None:
    depart(_departures, Environment.read())


def abandon() -> None:
    """Let `leave` not wait: this rank failed with a collective in flight, to which the others may never come."""
    global _abandoned
    _abandoned = True
