"""The command line: `samestep <command>`, the same as `python -m samestep.trainer <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS: dict[str, str] = {"chaos": "chaos", "ckpt": "ckpt", "verify-resume": "verify_resume"}
"""Each command, and the module in `commands/` that holds it. These import torch where they need it, not at their head."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 what was looked at is not in order, 2 usage."""
    parser = argparse.ArgumentParser("samestep", description="A trainer for PyTorch DistributedDataParallel.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module_name in COMMANDS.items():
        module = import_module(f".commands.{module_name}", __package__)
        command = commands.add_parser(name, help=module.DESCRIPTION, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
