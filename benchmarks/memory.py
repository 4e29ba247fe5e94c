"""Compare the memory of processes that train a larger model (50 million parameters), as ratios to the raw loop.

    python benchmarks/memory.py --mode bare --budget 1.05
    python benchmarks/memory.py --impls raw,samestep,lightning,accelerate --ranks 2 --mode typical

Each implementation of step_overhead.py trains in a process of its own (one for each rank). Printed are rank 0's peak
of resident memory, and what was resident at the start of each epoch but the first: it must not grow.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import step_overhead
import torch
import torch.distributed as dist

MIB = 2**20


class WatchedBatches(step_overhead.Batches):
    """Ready batches; notes at the start of each epoch how many MiB are resident."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.resident: list[int] = []

    def __iter__(self) -> Iterator[step_overhead.Batch]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE") // MIB)
        return super().__iter__()


def train(implementation: str, mode: str) -> None:
    """Train in this process, and print the memory it took."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if step_overhead.RANKS > 1:
        dist.init_process_group("gloo")
    settings = step_overhead.Settings(mode, "large", steps=10, epochs=5, block=5, clock="wall")
    batches = WatchedBatches(settings.steps)
    output, sys.stdout, sys.stderr = sys.stdout, step_overhead.Terminal(), step_overhead.Terminal()
    with tempfile.TemporaryDirectory() as folder:
        step_overhead.IMPLEMENTATIONS[implementation](settings, Path(folder), batches)
    sys.stdout, sys.stderr = output, sys.__stderr__
    if step_overhead.RANK == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MIB
        print(json.dumps({"peak": peak, "epochs": batches.resident[1:]}), flush=True)
    if step_overhead.RANKS > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--impls", default="raw,samestep")
    parser.add_argument("--mode", choices=["bare", "logging", "typical"], default="bare")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, help="the greatest ratio of Samestep's peak to the raw loop's")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # what the processes started here are called with
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.mode)
        return 0
    launcher = [sys.executable]
    if arguments.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    peaks: dict[str, float] = {}
    for name in ["raw", *(name for name in arguments.impls.split(",") if name != "raw")]:
        if name in ("lightning", "accelerate") and importlib.util.find_spec(name) is None:
            print(f"{name} is not installed, so it is left out (pip install {name})")
            continue
        results: list[dict[str, list[int] | int]] = []
        for _ in range(arguments.rounds):
            done = subprocess.run(
                [*launcher, __file__, f"--train={name}", f"--mode={arguments.mode}"],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
        peak = [int(str(result["peak"])) for result in results]
        peaks[name] = statistics.median(peak)
        print(
            f"{name:11} peak {peaks[name]:.0f} MiB [{min(peak)}, {max(peak)}], {peaks[name] / peaks['raw']:.3f} × raw; "
            f"by epoch {results[0]['epochs']}",
            flush=True,
        )
    if arguments.budget is None:
        return 0
    ratio = peaks["samestep"] / peaks["raw"]
    kept = ratio <= arguments.budget
    print(f"budget {'kept' if kept else 'EXCEEDED'}: {ratio:.3f} × raw, at most {arguments.budget} is allowed")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
