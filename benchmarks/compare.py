"""Compare what an optimizer step costs under several trainers, each as a ratio to the raw loop.

    python benchmarks/compare.py --impls raw,samestep --ranks 1 --mode bare
    python benchmarks/compare.py --impls raw,samestep,lightning,accelerate --ranks 2 --mode typical --rounds 7

A round starts step_overhead.py once for each implementation, in turn: a new process (or one for each rank), in which
the implementation and the raw loop alternate every few steps. Printed are median, least and greatest of the rounds'
ratios. `raw` against itself shows the noise: its ratio is 1 on a machine that can be trusted.

With `--budget 1.02` the exit status is 1 where Samestep's median is above it: of a step, or of a whole epoch where
the mode is `typical`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from step_overhead import IMPLEMENTATIONS, Settings, add_options

OPTIONS = [field.name for field in fields(Settings)]
WORKER = Path(__file__).with_name("step_overhead.py")


def measure(implementation: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One process of step_overhead.py, or one for each rank.

    Raises:
        RuntimeError: it failed; with the end of what it wrote.
    """
    launcher = [sys.executable]
    if arguments.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    options = [f"--{name}={getattr(arguments, name)}" for name in OPTIONS]
    result = subprocess.run(
        [*launcher, str(WORKER), implementation, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise RuntimeError(f"{implementation} failed with exit status {result.returncode}:\n{result.stderr[-2000:]}")
    return json.loads(lines[-1])


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--impls", default="raw,samestep", help=f"of {','.join(IMPLEMENTATIONS)}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, help="the greatest ratio of Samestep to the raw loop")
    add_options(parser)
    arguments = parser.parse_args()
    wanted = arguments.impls.split(",")
    for name in wanted:
        if name not in IMPLEMENTATIONS:
            parser.error(f"--impls {name}: expected some of {', '.join(IMPLEMENTATIONS)}")
    if arguments.budget is not None and "samestep" not in wanted:
        parser.error("--budget judges samestep: name it in --impls")
    for name in ("lightning", "accelerate"):
        if name in wanted and importlib.util.find_spec(name) is None:
            print(f"{name} is not installed, so it is left out (pip install {name})", flush=True)
            wanted.remove(name)

    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for _ in range(arguments.rounds):
        for name in wanted:
            rounds[name].append(measure(name, arguments))
    ranks = f"{arguments.ranks} rank{'s' if arguments.ranks > 1 else ''}"
    print(
        f"{arguments.mode}, {arguments.model} model, {ranks}, {arguments.steps} steps an epoch, {arguments.clock} clock, "
        f"{arguments.rounds} rounds: median [least, greatest]"
    )
    print(f"{'':11} {'µs a step':>23}  {'step ÷ raw':>22}  {'epoch ÷ raw':>22}  ms at an epoch's end (raw)")
    for name, results in rounds.items():

        def of(key: str, results: list[dict[str, Any]] = results) -> list[float]:
            return [result[key] for result in results]

        end = f"{statistics.median(of('other_end_ms')):.1f} ({statistics.median(of('raw_end_ms')):.1f})"
        print(
            f"{name:11} {spread(of('other_us'), '.0f'):>23}  {spread(of('step_ratio')):>22}  "
            f"{spread(of('epoch_ratio')):>22}  {end}"
        )
    if arguments.budget is None:
        return 0
    which = "epoch_ratio" if arguments.mode == "typical" else "step_ratio"
    ratio = statistics.median(result[which] for result in rounds["samestep"])
    kept = ratio <= arguments.budget
    what = which.replace("_ratio", "")
    print(f"budget {'kept' if kept else 'EXCEEDED'}: {what} {ratio:.3f} × raw, at most {arguments.budget} is allowed")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
