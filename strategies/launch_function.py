"""Run a function as N ranks from a program, a notebook or a test, and get what each rank returned."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def launch_function(function: Callable[..., T], processes: int, *args: Any) -> list[T]:
    """Call `function(*args)` in `processes` new processes of this host, under torch's elastic agent.

    Inside, the environment is that of torchrun: a Trainer built there finds its rank. The processes come from a fork
    server, not from this process: one that has used CUDA or threads can't be forked.

    Args:
        function: defined at the top of a module that the new processes can import; not in a notebook or `__main__`.
        processes: ranks, 1 or more.
        args: what can be pickled.

    Returns:
        What each rank returned, in the order of the ranks.

    Raises:
        ValueError, TypeError: the number is not above 0, or the function or an argument can't be sent.
        ChildFailedError: of torch: a rank failed; the others were ended.
    """
    # Imported here: the agent takes a tenth of a second to import.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not callable(function):
        raise TypeError(f"function={function!r}: expected a function at the top of a module.")
    if not isinstance(processes, int) or processes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"processes={processes}: expected a whole number of 1 or more.")
    if function.__module__ == "__main__":
        raise TypeError(
            f"{function.__qualname__} is defined in the program itself (or a notebook), which the new processes don't run: "
            "put it into a module, and import it."
        )
    try:
        pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"{function.__qualname__} or one of its arguments can't be sent to another process: {error}. Expected a function "
            "at the top of a module, and arguments that can be pickled."
        ) from None
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with tempfile.TemporaryDirectory(prefix="samestep-ranks-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"samestep-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="forkserver",
            max_restarts=0,  # torch's 3 would do everything again, three times
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        returned: dict[int, T] = elastic_launch(config, function)(*args)
    return [returned[rank] for rank in range(processes)]
