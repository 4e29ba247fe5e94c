"""`samestep verify-resume`: kill a program while it trains, resume it, and compare it with one that was left alone."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

DESCRIPTION = "Train, kill and resume a program, and prove that it goes on bit by bit."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--steps", type=_positive, default=20, help="optimizer steps of the run (default: 20)")
    parser.add_argument("--kills", type=_positive, default=3, help="how often it is killed and resumed (default: 3)")
    parser.add_argument(
        "--devices", type=_positive, help="ranks, by torchrun (default: as the program starts by itself)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the steps, ranks and hooks in which it dies (default: 0)"
    )
    parser.add_argument("--save-every", type=_positive, default=3, help="steps between checkpoints (default: 3)")
    parser.add_argument(
        "--timeout", type=_positive, default=1800, help="seconds that one start may take (default: 1800)"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep checkpoints, notes and output here (default: removed)")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="-- the program and its arguments: -- train.py lr=0.1"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: it resumes exactly; 1: it does not; 2: the program itself failed."""
    from ..resume_check.check import ProgramError, check_resume
    from ..resume_check.launching import command_starter

    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command or not (command[0].startswith("-") or Path(command[0]).is_file()):
        found = f"no file {command[0]!r}" if command else "nothing"
        print(
            f"samestep verify-resume: {found}; expected a program: samestep verify-resume -- train.py …",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="samestep-resume-") as temporary:
        folder = Path(arguments.keep or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            print(f"samestep verify-resume: --keep {folder} is not empty: expected a new folder.", file=sys.stderr)
            return 2
        start = command_starter(command, arguments.devices, arguments.timeout)
        try:
            report = check_resume(
                start, folder, steps=arguments.steps, kills=arguments.kills, seed=arguments.seed,
                save_every=arguments.save_every, say=lambda line: print(line, flush=True),
            )  # fmt: skip
        except ProgramError as error:
            print(f"samestep verify-resume: {error}", file=sys.stderr)
            return 2
    print(report)
    return 0 if report.exact else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number
