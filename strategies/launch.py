"""Start this very command again as N processes, under torch's elastic agent: what torchrun does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, cast


def relaunch(processes: int, command: Sequence[str] | None = None) -> NoReturn:
    """Run `command` (default: the command of this process) as `processes` ranks on this host, then exit.

    Exits with status 0 when all ranks succeeded, else 1, after naming the rank that failed first.

    Raises:
        RuntimeError: this process has no command that could be run again (a notebook, a prompt, stdin).
    """
    # Imported here: the agent takes a tenth of a second to import, and most processes never need it.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = own_command() if command is None else command
    # Without a number torchrun sets 1, and says so in a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        # The agent leaves its folder behind, unless it is given one.
        with tempfile.TemporaryDirectory(prefix="samestep-ranks-") as logs:
            options = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={logs}", "--no-python"]
            run.main([*options, *command])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message: Any = failure.message  # a dict, where the rank wrote an error file
        why = cast("dict[str, str]", message).get("message", "") if isinstance(message, dict) else str(message)
        print(f"samestep: rank {rank} failed first, with exit code {failure.exitcode}: {why}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def own_command() -> list[str]:
    """The command line of this process, as it can be run again.

    Raises:
        RuntimeError: there is none.
    """
    program = sys.orig_argv[1:]
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "devices above 1 starts the whole program again, but this is a child process or a thread of it: start the "
            "ranks from the main program, or with torchrun; or use devices=1 here."
        )
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)
    runs_again = program and ("-c" in program or (file and os.path.isfile(file)))
    if "ipykernel" in sys.modules or not runs_again:
        raise RuntimeError(
            "devices above 1 starts this program again as several processes, but this process has no program "
            "(a notebook or a prompt). Put the code into a file and run `torchrun --standalone --nproc-per-node=N "
            "file.py`, or use devices=1 here."
        )
    return [sys.executable, *program]
