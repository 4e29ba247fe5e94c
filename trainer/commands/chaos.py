"""`samestep chaos FAULTS -- COMMAND`: run a program, and make faults happen in it."""

from __future__ import annotations

import argparse
import os
import sys

DESCRIPTION = "run a program and make faults happen in it: kill, stall, NaN, full disk, …"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    from ...callbacks.chaos import KINDS, PHASES

    parser.add_argument("faults", help="one or more, separated by ';', as 'kill rank=1 step=7'")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="behind --: the program, as torchrun … train.py")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = "\n".join(f"  {name:10} {what}" for name, (what, _) in KINDS.items())
    parser.epilog = (
        f"faults:\n{kinds}\n\nwhere, all optional:\n  rank=1 (all)   step=7 (0): when so many steps are done   restart=0 (0), "
        f"or any\n  phase=training: or {', '.join(PHASES)}\nwhat more: to=launcher, code=, seconds=, how=truncate"
    )


def run(arguments: argparse.Namespace) -> int:
    """Become the program, with the faults in its environment; 2: they can't be read, or there is no program."""
    from ...callbacks.chaos import VARIABLE, parse_faults

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        if not command:
            raise ValueError("no program: expected `samestep chaos 'kill step=7' -- torchrun … train.py`.")
        parse_faults(arguments.faults)
        os.execvpe(command[0], command, {**os.environ, VARIABLE: arguments.faults})
    except (ValueError, OSError) as error:
        print(f"samestep chaos: {error}", file=sys.stderr)
        return 2
