"""Time `import samestep.trainer` against `import torch`.

    python benchmarks/import_time.py --budget 1.15

Each import runs in a new interpreter, in turns; its start is not counted. Each round gives a ratio; printed are the
median, least and greatest. The exit status is 1 where the median is above the budget.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import sys, time
began = time.perf_counter()
import {module}
print(time.perf_counter() - began, len(sys.modules))
"""


def measure(module: str) -> tuple[float, int]:
    """Seconds that an import takes, and how many modules are there afterwards."""
    program = PROGRAM.format(module=module)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    seconds, modules = output.split()
    return float(seconds), int(modules)


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float)
    arguments = parser.parse_args()
    modules = ("torch", "samestep.trainer")
    for module in modules:  # compiles, and brings the files into memory
        measure(module)
    rounds = [[measure(module) for module in modules] for _ in range(arguments.rounds)]
    for index, module in enumerate(modules):
        seconds = [times[index][0] for times in rounds]
        print(
            f"import {module:17} {statistics.median(seconds):.2f} s [{min(seconds):.2f}, {max(seconds):.2f}], "
            f"{rounds[0][index][1]} modules"
        )
    ratios = [ours[0] / theirs[0] for theirs, ours in rounds]
    ratio = statistics.median(ratios)
    print(f"ratio                    {ratio:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]")
    if arguments.budget is None:
        return 0
    kept = ratio <= arguments.budget
    print(f"budget {'kept' if kept else 'EXCEEDED'}: at most {arguments.budget} is allowed")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
