"""Fixtures of all tests: what one test changes in the process, no other test sees."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from samestep.strategies import process_groups

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> Iterator[None]:
    """Run in an empty folder, seeded; put back what was there before."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    process_groups.leave()  # a fit with DDP in this process has opened them
    os.environ.clear()
    os.environ.update(environment)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
