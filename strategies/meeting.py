"""How the ranks of a job find each other: through one store, and by name."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from .environment import Environment
from .first_cause import first_departure, note_departure

# Seconds after which a rank says what it waits for.
_SAID_AFTER = 10.0


def store_of_job(environment: Environment, timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other. It may be older than they: `meet` gives them a part of their own.

    Raises:
        RuntimeError: an address is missing or wrong, its port is taken, or nobody answers there in `timeout`.
    """
    if environment.world_size == 1 and not os.environ.get("MASTER_ADDR"):
        return dist.HashStore()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise RuntimeError(
                f"{name} is not set, but WORLD_SIZE={environment.world_size}: the ranks can't find each other. "
                "torchrun sets it; by hand, give every process the address and a free port of rank 0's host."
            )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise RuntimeError(f"MASTER_PORT={port!r}: expected a port number, 1 to 65535.")
    hosts_it = environment.rank == 0 and not _agent_hosts_the_store()
    if not hosts_it:
        _wait_for_master(address, int(port), environment, timeout)
    try:
        store = dist.TCPStore(
            address, int(port), environment.world_size, is_master=hosts_it, timeout=timeout, wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RuntimeError(
            f"MASTER_PORT={port} is taken on this host, by another job or a process that an earlier one left: expected a "
            "free one. Give another number to all ranks; torchrun --standalone takes a free one by itself."
        ) from None
    return dist.PrefixStore("samestep", store)


def meet(
    job: dist.Store, departures: dist.Store, environment: Environment, timeout: timedelta
) -> tuple[dist.Store, int]:
    """Wait until all ranks are here; return a part of the store that only those who meet now have, and their meeting's number.

    torchrun re-uses one store for all its restarts, and gloo, finding the addresses of processes that are dead, fails or
    hangs. How often torchrun has restarted tells them not apart: each host's agent counts for itself, and counts no host that
    comes or goes. So rank 0 numbers the meetings, and tells the number to each process that asks.

    torch's own meeting would not notice either that a rank has left the program, nor name who is missing.

    Raises:
        RuntimeError: a rank has left its program before it came here, or some did not come in `timeout`.
    """
    everybody = [_here(rank) for rank in range(environment.world_size)]
    question, meeting = uuid.uuid4().hex, None
    if environment.rank == 0:
        job.set(question, str(job.add("meetings", 1)))
    else:
        job.set(_asks(environment.rank), question)
    begun, said = time.monotonic(), False
    while meeting is None or not meeting.check(everybody):
        if meeting is None and job.check([question]):
            meeting = dist.PrefixStore(f"meeting_{job.get(question).decode()}", job)
            meeting.set(_here(environment.rank), "")
        if environment.rank == 0:
            _answer(job, job.get(question), environment.world_size)
        left = first_departure(departures)
        if left is not None and left in _missing(meeting, environment):
            raise RuntimeError(
                f"rank {left} has ended its program and never came here, where the other ranks wait for it: expected the "
                "same runs of the Trainer on every rank. Look for a sys.exit() or a condition on the rank before them."
            )
        waited = time.monotonic() - begun
        if waited > timeout.total_seconds() or (not said and waited > _SAID_AFTER):
            missing = ", ".join(map(str, _missing(meeting, environment)))
            what = f"rank {environment.rank} has waited {waited:.0f} s for the other ranks; missing: {missing}"
            if waited > timeout.total_seconds():
                raise RuntimeError(
                    f"{what}. Their own messages say why; if they only need longer before they come here, raise "
                    "DDPStrategy(timeout=…)."
                )
            said = _say(what)
        time.sleep(0.05)
    return meeting, int(job.get(question))


def _answer(job: dist.Store, number: bytes, world_size: int) -> None:
    """Tell the number of the meeting to all who ask; what a process asked that is dead is answered, too."""
    for rank in range(1, world_size):
        if job.check([_asks(rank)]):
            job.set(job.get(_asks(rank)).decode(), number.decode())


def _missing(meeting: dist.Store | None, environment: Environment) -> list[int]:
    """The ranks that have not come, as far as this one knows: without an answer it misses rank 0."""
    if meeting is None:
        return [0]
    return [rank for rank in range(environment.world_size) if not meeting.check([_here(rank)])]


def depart(departures: dist.Store | None, environment: Environment) -> None:
    """At the end of the program, tell ranks that still wait for this one. `departures` None: it has met nobody."""
    if not _agent_hosts_the_store():
        return  # rank 0 may have ended already, and the store with it
    if departures is None:
        try:
            departures = departures_before_meeting(store_of_job(environment, timedelta(seconds=2)), environment)
        except RuntimeError:
            return  # so has the agent
    note_departure(departures, environment.rank)


def departures_before_meeting(job: dist.Store, environment: Environment) -> dist.Store:
    """Where ranks note that they have left without having met anybody. As good as can be: see `meet`."""
    return departures_of(dist.PrefixStore(f"attempt_{environment.restart}", job))


def departures_of(meeting: dist.Store) -> dist.Store:
    """Where ranks that have met note that they have left."""
    return dist.PrefixStore("departures", meeting)


def _wait_for_master(address: str, port: int, environment: Environment, timeout: timedelta) -> None:
    """Wait until somebody listens there; say after a while that nobody does, and what the system says about it."""
    begun, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            waited = time.monotonic() - begun
            what = (
                f"rank {environment.rank} can't reach MASTER_ADDR={address} MASTER_PORT={port} for {waited:.0f} s: {error}. "
                "It is rank 0's host, where rank 0 must be running, and no firewall between"
            )
            if waited > timeout.total_seconds():
                raise RuntimeError(f"{what}.") from None
            if not said and waited > _SAID_AFTER:
                said = _say(what)
            time.sleep(0.2)
        else:
            return


def _say(what: str) -> bool:
    print(f"samestep: {what}.", file=sys.stderr, flush=True)
    return True


def _agent_hosts_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _here(rank: int) -> str:
    return f"here_{rank}"


def _asks(rank: int) -> str:
    return f"asks_{rank}"
