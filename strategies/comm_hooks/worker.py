"""Where the collectives of a hook run: in a thread of their own on CPU, at once on CUDA.

A hook of several collectives must issue them in the same order on every rank. Chained with `Future.then` they would not
be: gloo runs the callbacks in its own threads, in another order on each rank, and the ranks deadlock (torch's PowerSGD
does, with two buckets). In one thread with a queue, the order is that of the buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], Tensor]


class Worker(Protocol):
    """Does work in the order in which it is submitted."""

    def submit(self, work: Work) -> torch.futures.Future[Tensor]:
        """Return the future of what `work()` returns, or of the exception it raises."""
        ...

    def close(self) -> None:
        """No more work comes."""
        ...


def worker_for(device: torch.device) -> Worker:
    """The worker for gradients on this device."""
    return StreamWorker(device) if device.type == "cuda" else ThreadWorker()


class ThreadWorker:
    """One daemon thread with a queue: the backward goes on while it communicates."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Work, torch.futures.Future[Tensor]] | None] = SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._threads = torch.get_num_threads()
        # A daemon: where a peer has died it may wait for the group's timeout, and the process must end before.
        self._thread = threading.Thread(target=self._run, name="comm-hook", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> torch.futures.Future[Tensor]:
        """Queue the work."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._lock:
            self._unfinished += 1
        self._queue.put((work, future))
        # DDP waits in C++, to which `set_exception` is just another value; what a callback raises is an error there.
        return future.then(_value)

    def close(self) -> None:
        """End the thread once the queue is empty; wait for that only where nothing is left to do."""
        self._queue.put(None)
        with self._lock:
            idle = self._unfinished == 0
        if idle:
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        # The number of threads of a matrix product is a thread's own, and must be equal where its bits must be.
        torch.set_num_threads(self._threads)
        failure: Exception | None = None
        while (item := self._queue.get()) is not None:
            work, future = item
            value = None
            try:
                # After a failure this rank has left out a collective: another one would be paired with a wrong one.
                if failure is None:
                    value = tensor_of(work())
            except Exception as error:
                failure = error
            with self._lock:
                self._unfinished -= 1
            if value is not None:
                future.set_result(value)
            else:
                assert failure is not None
                future.set_exception(failure)  # pyright: ignore[reportArgumentType] (torch annotates it wrongly)
            # Else the last bucket would be kept alive until the next one comes.
            del item, work, future, value


class StreamWorker:
    """On CUDA: work is issued at once, on the current stream, which orders it by itself. No thread is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.no_grad()
    def submit(self, work: Work) -> torch.futures.Future[Tensor]:
        """Issue the work; the future is complete at once, and its reader's stream waits for the device."""
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
        future.set_result(tensor_of(work()))
        return future

    def close(self) -> None:
        """There is nothing to end."""


def tensor_of(value: Any) -> Tensor:
    """The tensor that a hook or a wire returned.

    Raises:
        TypeError: it returned something else, or nothing.
    """
    if isinstance(value, Tensor):
        return value
    raise TypeError(
        f"the communication hook's mean returned {type(value).__name__}: expected the tensor with the mean, also where it was "
        "reduced in place (`return tensor`)."
    )


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()
