"""The error file of a rank: torch's agent reads there which rank failed first, and with what."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from types import TracebackType

from .first_cause import PeerError, is_consequence, is_of_worker, text_of

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_recorded: BaseException | None = None


def record_error(error: BaseException) -> None:
    """Write the error into this rank's file, if torch's agent started it; once for each error.

    The agent takes the oldest for the cause, but knows the time by the second only, and peers fail within
    milliseconds. So an error that only says that another rank has ended is dated a minute later. Neither it nor one that
    says that a worker has died replaces what a worker of this rank has written.
    """
    global _recorded
    path = os.environ.get(_VARIABLE)
    if not path or error is _recorded:
        return
    _recorded = error
    text, consequence = f"{type(error).__name__}: {text_of(error)}", is_consequence(error)
    if (consequence or is_of_worker(error)) and os.path.exists(path):
        return
    told = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "timestamp": str(int(time.time()) + (60 if consequence else 0)),
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": told}}, file)
    except OSError as problem:
        print(f"samestep: the error file {path} could not be written: {problem}", file=sys.stderr)


# Seconds for the rank that was first to be gone: the agent names the one that it sees end first, and ends the others then.
_HEAD_START = 1.0


def record_uncaught_errors() -> None:
    """From here on, an exception that ends this process goes into the error file, wherever it was raised.

    Ctrl-C, which reaches all ranks at once, prints where this one was, and no traceback; nor does a rank that ends because
    of another one. Nothing happens in a process that torch's agent did not start, nor in the workers of one that it did.
    """
    if not os.environ.get(_VARIABLE) or multiprocessing.parent_process() is not None:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record_error(error)
        if isinstance(error, KeyboardInterrupt):
            # The agent hands on the signal that the terminal has sent already.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print(f"samestep: rank {os.environ.get('RANK')} was interrupted{_place(trace)}", file=sys.stderr)
        elif isinstance(error, PeerError):
            print(f"samestep: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)
        if is_consequence(error) and not (isinstance(error, PeerError) and error.is_known):
            time.sleep(_HEAD_START)

    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
