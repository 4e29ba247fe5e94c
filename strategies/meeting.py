"""How the ranks of a job find each other: through one store, and by name."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from .environment import Environment
from .first_cause import first_departure, note_departure

# Seconds after which a rank says what it waits for.
_SAID_AFTER = 10.0


def store_of_job(environment: Environment, timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other, fresh for every restart.

    torchrun re-uses one store for all its restarts: without the prefix, gloo reads the addresses
    of processes that are dead, and fails or hangs.

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
    return dist.PrefixStore(f"attempt_{environment.restart}", store)


def meet(store: dist.Store, departures: dist.Store, environment: Environment, timeout: timedelta) -> None:
    """Wait until all ranks are here.

    torch's own meeting would not notice that a rank has left the program, nor name who is missing.

    Raises:
        RuntimeError: a rank has left its program before it came here, or some did not come in `timeout`.
    """
    ranks = range(environment.world_size)
    store.set(_here(environment.rank), "")
    begun, said = time.monotonic(), False
    while not store.check([_here(rank) for rank in ranks]):
        left = first_departure(departures)
        if left is not None and not store.check([_here(left)]):
            raise RuntimeError(
                f"rank {left} has ended its program and never came here, where the other ranks wait for it: expected the "
                "same runs of the Trainer on every rank. Look for a sys.exit() or a condition on the rank before them."
            )
        waited = time.monotonic() - begun
        if waited > timeout.total_seconds() or (not said and waited > _SAID_AFTER):
            missing = ", ".join(str(rank) for rank in ranks if not store.check([_here(rank)]))
            what = f"rank {environment.rank} has waited {waited:.0f} s for the other ranks; missing: {missing}"
            if waited > timeout.total_seconds():
                raise RuntimeError(
                    f"{what}. Their own messages say why; if they only need longer before they come here, raise "
                    "DDPStrategy(timeout=…)."
                )
            said = _say(what)
        time.sleep(0.05)


def depart(departures: dist.Store | None, environment: Environment) -> None:
    """At the end of the program, tell ranks that still wait for this one. `departures` None: it has met nobody."""
    if not _agent_hosts_the_store():
        return  # rank 0 may have ended already, and the store with it
    if departures is None:
        try:
            store = store_of_job(environment, timedelta(seconds=2))
        except RuntimeError:
            return  # so has the agent
        departures = departures_of(store)
    note_departure(departures, environment.rank)


def departures_of(store: dist.Store) -> dist.Store:
    """Where ranks note that they have left, for the whole job."""
    return dist.PrefixStore("departures", store)


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
