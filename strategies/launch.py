"""Start this very command again as N processes, under torch's elastic agent: what torchrun does."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from .error_file import record_error
from .first_cause import PeerError

# With what a rank leaves that a signal has told to: interrupted, and preempted.
_AFTER_SIGNAL = (130, 143)


def relaunch(processes: int, command: Sequence[str] | None = None, *, max_restarts: int = 0) -> NoReturn:
    """Run `command` (default: the command of this process) as `processes` ranks on this host, then exit.

    Exits with status 0 when all ranks succeeded; with the exit code of the rank that failed first, after naming it
    (128 + n where signal n ended it); with 130 after Ctrl-C, with 143 after SIGTERM or SIGUSR1.

    Args:
        processes: ranks.
        command: what each of them runs.
        max_restarts: how often all ranks are started again after one has failed.

    Raises:
        RuntimeError: this process has no command that could be run again (a notebook, a prompt, stdin).
    """
    # Imported here: the agent takes a tenth of a second to import, and most processes never need it.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = own_command() if command is None else command
    # Without a number torchrun sets 1, and says so in a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # What the agent does about a failed rank or a signal; the line below says why it does it.
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        # The agent leaves its folder behind, unless it is given one.
        with tempfile.TemporaryDirectory(prefix="samestep-ranks-") as logs:
            options = [
                "--standalone", f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}", f"--log-dir={logs}",
                "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--no-python",
            ]  # fmt: skip
            run.run(run.parse_args([*options, *command]))
    except ChildFailedError as error:
        failures = error.failures

        # Those that only ended because another one had come last: the agent knows the time by the second only.
        rank = min(failures, key=lambda rank: (_was_ended(failures[rank]), failures[rank].timestamp))
        failure = failures[rank]
        # One that has told its error and was ended on its way out would have ended with 1.
        code = 1 if failure.exitcode == -signal.SIGTERM and _told(failure) else failure.exitcode
        kind, _, text = _reason(failure).partition(": ")
        if kind == PeerError.__name__:  # the rank that it names left with exit code 0
            print(f"samestep: {text}", file=sys.stderr)
        elif code in _AFTER_SIGNAL and kind in ("Preempted", "Interrupted"):
            print(f"samestep: all ranks ended: {text}", file=sys.stderr)
        else:
            reason = f": {_reason(failure)}" if _reason(failure) else ""
            print(f"samestep: rank {rank} failed first, with exit code {code}{reason}", file=sys.stderr)
        _leave(code if code > 0 else 128 - code)
    except SignalException as error:
        print(f"samestep: {error.sigval.name} received, all ranks are stopped", file=sys.stderr)
        _leave(130 if error.sigval == signal.SIGINT else 143)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End this process here. By SystemExit its `finally` and `except` would run once more, with an untrained model."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _told(failure: Any) -> bool:
    """Whether the rank wrote an error file."""
    return isinstance(failure.message, dict)


def _reason(failure: Any) -> str:
    """What the rank wrote into its error file, or the signal that ended it; the first line."""
    message: Any = failure.message  # a dict, where the rank wrote an error file
    if isinstance(message, dict):
        message = cast("dict[str, str]", message).get("message", "")
    elif failure.exitcode > 0:
        message = ""  # advice of torch's
    return message.splitlines()[0] if message else ""


def _was_ended(failure: Any) -> bool:
    """Whether the rank ended by the agent's SIGTERM, or by its own account because of another one's end."""
    kind = _reason(failure).partition(":")[0]
    if kind in ("Preempted", PeerError.__name__):
        return True
    # A rank that has told its own error may be so slow to end that it is ended.
    return failure.exitcode == -signal.SIGTERM and not _told(failure)


def end_with_launcher() -> None:
    """From here on this rank ends when torch's agent, which started it, is gone: nobody else would end it.

    It gets a SIGTERM, so that it may save; what is left of it after half a minute is ended for good.
    """
    global _watched
    if _watched or not os.environ.get("TORCHELASTIC_RUN_ID"):
        return
    _watched = True

    def watch(launcher: int = os.getppid()) -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        print("samestep: the process that started this rank is gone, so the rank ends.", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="samestep: launcher", daemon=True).start()


_watched = False


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


def refuse_import_of_main(what: str) -> None:
    """Refuse to run where a child process imports the program, to find its classes: it would begin the run anew.

    On several ranks it would even take the place of the rank that started it, and all would wait.

    Raises:
        RuntimeError: names the remedy.
    """
    # What multiprocessing itself looks at, to refuse a child that starts children there.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        error = RuntimeError(
            f"{what} in a child process (a worker of a DataLoader, say) that only imports the program, as processes "
            "started by 'spawn' and 'forkserver' do. Put what the program does, Trainer and all, into a function, and "
            'call it under `if __name__ == "__main__":`.'
        )
        record_error(error)  # the rank that started this process sees only that it ended
        raise error
