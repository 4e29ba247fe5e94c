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


@contextmanager
def seeded_rng(seed: int) -> Generator[None]:
    """Run the body from a given seed, and leave the generators afterwards as they were before."""
    with kept_rng():
        seed_everything(seed)
        yield
