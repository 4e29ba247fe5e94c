"""Hosts leave and return, and the run goes on with those that are there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from elastic_program import SAMPLES, Noted, lineage, noted_in
from samestep.strategies.environment import Environment
from samestep.strategies.meeting import departures_before_meeting, meet

PROGRAM = Path(__file__).parent / "elastic_program.py"
CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def host(port: int, folder: Path, *, keeps_rendezvous: bool) -> subprocess.Popen[bytes]:
    """Start the agent of a host, which this one plays. Ranks are sorted by address, then by the agent's process id."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", "--local-addr=127.0.0.1",
        f"--rdzv-conf=is_host={int(keeps_rendezvous)},{CONF}", PROGRAM, folder,
    ]  # fmt: skip
    where = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"host-{time.monotonic()}.txt").open("w") as output:
        return subprocess.Popen(command, env=where, stdout=output, stderr=subprocess.STDOUT)


def until(condition: Callable[[list[Noted]], bool], folder: Path, agent: subprocess.Popen[bytes]) -> list[Noted]:
    """Wait for what the run notes."""
    deadline = time.monotonic() + 240
    while not condition(noted_in(folder)):
        said = [path.read_text() for path in folder.glob("host-*")]
        assert agent.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return noted_in(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_host_leaves_and_returns_and_each_sample_of_each_epoch_counts_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [host(port, tmp_path, keeps_rendezvous=True)]
    try:
        agents.append(host(port, tmp_path, keeps_rendezvous=False))
        ranks = until(
            lambda noted: any(each.ranks == 2 and len(each.steps) > 12 for each in noted), tmp_path, agents[0]
        )
        agents[1].kill()
        [leaves] = [each.process for each in ranks if each.agent == agents[1].pid]
        os.kill(leaves, signal.SIGKILL)  # the steps since the last checkpoint are lost
        until(lambda noted: any(each.ranks == 1 and len(each.steps) > 6 for each in noted), tmp_path, agents[0])
        agents.append(host(port, tmp_path, keeps_rendezvous=False))
        assert [agents[0].wait(400), agents[2].wait(60)] == [0, 0], [f.read_text() for f in tmp_path.glob("host-*")]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its rank
        for agent in agents:
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                agent.kill()
    assert [each.ranks for each in noted_in(tmp_path)] == [2, 2, 1, 2, 2]
    assert lineage(tmp_path) == 2 * [Counter(map(float, range(SAMPLES)))]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["step"], status["world_size"]) == ("completed", 200, 2)


def test_processes_of_one_start_meet_whatever_earlier_ones_have_left_in_the_store() -> None:
    """The ranks are threads. Agents on different hosts count restarts differently, or not at all."""
    store = dist.HashStore()
    store.set("asks_1", "a process that was killed before it had an answer")
    store.set("asks_2", "another one")
    timeout = timedelta(seconds=30)
    places: list[set[bytes]] = []
    for start, restarts in enumerate([(0, 0, 0), (0, 0, 0), (1, 0, 3), (1, 0)]):
        met: dict[int, dist.Store] = {}
        numbers: dict[int, int] = {}

        def come(rank: int, restart: int, ranks: int, met: dict[int, dist.Store], numbers: dict[int, int]) -> None:
            environment = Environment(rank, 0, ranks, 1, restart, True)
            met[rank], numbers[rank] = meet(store, departures_before_meeting(store, environment), environment, timeout)

        threads = [
            threading.Thread(target=come, args=(rank, restart, len(restarts), met, numbers))
            for rank, restart in enumerate(restarts)
        ]
        for thread in threads if start % 2 else reversed(threads):
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join(40)
        assert set(numbers.values()) == {start + 1}
        met[0].set("start", str(start))
        places.append({meeting.get("start") for meeting in met.values()})
    assert places == [{b"0"}, {b"1"}, {b"2"}, {b"3"}]
