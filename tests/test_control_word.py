"""How often ranks exchange the control word, and what comes of it in a validation."""

from __future__ import annotations

import time

import pytest
import torch
from samestep.strategies import Pending, Strategy
from samestep.trainer.control import LEAVE, SAVE, STOP, ControlWord


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


def test_a_validation_has_a_pace_of_its_own_and_leaves_that_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    strategy = TwoRanks()
    control = ControlWord(strategy)
    for _ in range(10_000):
        now += 0.001
        control.poll()
    before = strategy.words
    with control.pace_of_its_own():  # of batches that take a second each
        for _ in range(60):
            now += 1.0
            assert not control.leaves()
    assert 25 <= strategy.words - before <= 60
    before = strategy.words
    for _ in range(10_000):
        now += 0.001
        control.poll()
    assert 9 <= strategy.words - before <= 12


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_ranks_agree_on_in_a_validation_comes_up_at_the_next_step_once(world_size: int) -> None:
    strategy = TwoRanks()
    strategy.world_size = world_size  # pyright: ignore
    control = ControlWord(strategy)
    control.raise_flag(SAVE)
    flags = [control.poll() for _ in range(2)]
    assert flags[-1] | flags[-2] == SAVE
    agreed = control.agreed
    with control.pace_of_its_own():
        control.raise_flag(STOP)
        assert not any(control.leaves() for _ in range(4))
        assert control.agreed == agreed  # a timed checkpoint that is due behind the validation is not forgotten
    assert control.agreed == agreed
    assert [control.poll() & STOP for _ in range(20)].count(STOP) == 1
    with control.pace_of_its_own():
        control.raise_signal(15)
        assert any(control.leaves() for _ in range(3))
    assert control.poll() & LEAVE
