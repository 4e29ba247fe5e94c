"""Random numbers: one seed for the run, a stream of its own for each rank, states that can be saved."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int | None = None, workers: bool = True) -> int:
    """Seed Python's `random`, numpy (if the program uses it) and torch on all devices.

    Args:
        seed: from 0 to 2⁶³−1; None: a random one, which differs from rank to rank.
        workers: here for Lightning's sake; the workers of loaders are always seeded by the Trainer's seed.

    Returns:
        The seed.
    """
    if seed is None:
        seed = random.SystemRandom().getrandbits(63)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def derived_seed(*parts: int | str) -> int:
    """A seed from 0 to 2⁶³−1 that depends on all parts and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process, of plain types: it loads with `weights_only=True`."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring the generators to what `rng_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def kept_rng() -> Generator[None]:
    """Leave the generators afterwards as they were before."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


class RandomStream:
    """Random numbers of its own for a part of the program: each `with` goes on where the one before ended.

    Of the CPU's generators only, so it is quick enough for each batch.

    Args:
        seed: what the numbers begin with.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: _CPUState | None = None
        self._outside: _CPUState | None = None

    def __enter__(self) -> None:
        self._outside = _cpu_state()
        if self._inside is None:
            _seed_cpu(self._seed)
        else:
            _set_cpu_state(self._inside)

    def __exit__(self, *_: Any) -> None:
        assert self._outside is not None
        self._inside = _cpu_state()
        _set_cpu_state(self._outside)

    def state_dict(self) -> dict[str, Any] | None:
        """Where the numbers stand between two `with`, of plain types; None: at their beginning."""
        if self._inside is None:
            return None
        python, cpu, numpy = self._inside
        plain = None if numpy is None else [numpy[0], numpy[1].tolist(), *numpy[2:]]
        return {"python": python, "torch": cpu, "numpy": plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        version, numbers, gauss = state["python"]
        numpy = None
        if state["numpy"] is not None:
            import numpy as np

            kind, keys, *rest = state["numpy"]
            numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
        self._inside = (version, tuple(numbers), gauss), state["torch"], numpy


@contextmanager
def sample_rng(seed: int) -> Generator[None]:
    """As `seeded_rng`, for the CPU's generators only: quick enough for each sample."""
    before = _cpu_state()
    _seed_cpu(seed)
    try:
        yield
    finally:
        _set_cpu_state(before)


# Of Python's, torch's and, where the program uses it, numpy's generator.
_CPUState = tuple[tuple[Any, ...], torch.Tensor, "tuple[Any, ...] | None"]


def _cpu_state() -> _CPUState:
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return random.getstate(), torch.get_rng_state(), numpy


def _set_cpu_state(state: _CPUState) -> None:
    python, cpu, numpy = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def seeded_rng(seed: int) -> Generator[None]:
    """Run the body from a given seed, and leave the generators afterwards as they were before."""
    with kept_rng():
        seed_everything(seed)
        yield
