"""The largest micro-batch: found by each rank alone, agreed by all, and nothing is left of the trials."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.trainer import largest_batch
from tasks import Regression, numbers, parameters_of, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


class Limited(Regression):
    """A device that holds so many samples, on each rank another number. BatchNorm and dropout are moved by a step."""

    def __init__(self, *limits: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.limits, self.tried = limits, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        size = len(batch[1])
        self.tried.append(size)
        if size > self.limits[self.global_rank]:
            raise torch.OutOfMemoryError("made up")
        if size == 1:
            return None  # BatchNorm needs two
        return super().training_step(batch, batch_idx)


def find(*limits: int, most: int = 1 << 16) -> tuple[int, list[int], int]:
    """The answer, the sizes tried, and how many collectives began while they were."""
    task = Limited(*limits)
    trainer = quiet_trainer(max_epochs=1, precision=64, seed=5)
    loader = DataLoader(numbers(8), 2)
    torch.manual_seed(7)
    before, buffers, random = (
        parameters_of(task).double(),
        [b.clone() for b in task.buffers()],
        torch.random.get_rng_state(),
    )
    size = largest_batch(trainer, task, loader, most=most)
    assert torch.equal(parameters_of(task), before)
    assert all(torch.equal(now, then.to(now.dtype)) for now, then in zip(task.buffers(), buffers, strict=True))
    assert torch.equal(torch.random.get_rng_state(), random)
    collectives = getattr(trainer.strategy, "collectives", {})
    trainer.fit(task, loader)  # the trainer is as good as new
    assert trainer.global_step == 4 // trainer.world_size
    return size, task.tried[: -trainer.global_step], collectives.get("largest batch", 0)


@pytest.mark.parametrize("limit", [2, 3, 7, 8, 100])
def test_the_largest_size_is_found_by_doubling_and_halving(limit: int) -> None:
    size, tried, _ = find(limit)
    assert size == limit
    assert len(tried) <= 2 * limit.bit_length() + 2


def test_no_more_than_the_most_is_tried() -> None:
    assert find(100, most=12)[:2] == (12, [1, 2, 4, 8, 12])


def test_ranks_that_hold_different_numbers_agree_on_the_smallest() -> None:
    first, second = run_ranks(find, 2, 13, 6)
    assert (first[0], second[0]) == (6, 6)
    assert max(first[1]) > 13 > max(second[1])  # each tried by itself, out of step with the other
    assert first[2] == second[2] == 1


def test_a_rank_that_holds_nothing_ends_all() -> None:
    for error in errors_of_ranks(find, 2, 4, 0):
        assert error == "OutOfMemoryError: not even a micro-batch of one sample fits into the memory of rank 1."


def test_what_can_not_be_tried_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        largest_batch(quiet_trainer(), Limited(4), DataLoader(numbers(4)), most=0)
    with pytest.raises(ValueError, match="needs a DataLoader whose dataset has a length"):
        largest_batch(quiet_trainer(), Limited(4), [torch.ones(3)])  # pyright: ignore[reportArgumentType]


def test_a_model_that_can_not_take_a_single_sample_begins_with_two() -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    trainer = quiet_trainer(precision=64)
    assert largest_batch(trainer, Normed(), DataLoader(numbers(8), 2), most=5) == 5
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        largest_batch(trainer, Normed(), DataLoader(numbers(8), 2), most=1)
    with pytest.raises(ValueError, match="the loader's dataset is empty"):
        largest_batch(trainer, Normed(), DataLoader([], 2))
