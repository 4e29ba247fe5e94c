"""How often ranks exchange the control word."""

from __future__ import annotations

import time

import pytest
import torch
from samestep.strategies import Pending, Strategy
from samestep.trainer.control import ControlWord


class TwoRanks(Strategy):
    """Counts the words; the other rank always says the same."""

    world_size = 2  # pyright: ignore
    words = 0

    def start_all_reduce_max(self, tensor: torch.Tensor, *, name: str) -> Pending:
        self.words += 1
        return Pending(tensor)


@pytest.mark.parametrize(("steps", "epochs"), [(5, 200), (10_000, 1), (300, 40)])
def test_a_word_comes_about_once_a_second_however_short_the_epochs(
    steps: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    strategy = TwoRanks()
    control = ControlWord(strategy)
    for _ in range(epochs):
        for _ in range(steps):
            now += 0.001
            control.poll()
        control.settle()  # with the interval once doubled at each epoch's end, this overflowed after 63 of them
    assert strategy.words <= epochs + 10 + now + 1  # the first ones come after 1, 2, 4, … steps
    for _ in range(2000):  # two seconds on, a wish is known
        now += 0.001
        control.poll()
    control.raise_flag(1)
    assert any(control.poll() for _ in range(2500))
