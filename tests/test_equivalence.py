"""N ranks × batch B are the same training as 1 rank × batch N·B."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch.utils.data import DataLoader


def train(batch_size: int, samples: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    task = Regression()
    trainer = quiet_trainer(precision="64-true", seed=5, **options)
    trainer.fit(task, loader(samples, batch_size, shuffle=True))
    return {
        "parameters": parameters_of(task),
        "step": trainer.global_step,
        "loss": trainer.callback_metrics["train/loss"],
        "norm": trainer.gradient_norm,
    }


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, {"gradient_clip_val": 0.1},
     {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}],
)  # fmt: skip
def test_ranks_equal_one_rank_with_their_batch(ranks: int, options: dict[str, Any]) -> None:
    options = {"max_steps": 20, **options}
    samples = ranks * 8 * 15  # more than one epoch
    several = run_ranks(train, ranks, 8, samples, options)
    one = train(8 * ranks, samples, options)
    assert one["step"] == 20
    for rank in several:
        assert rank["step"] == 20
        torch.testing.assert_close(rank["parameters"], one["parameters"], rtol=0, atol=1e-12)
        torch.testing.assert_close(rank["loss"], one["loss"], rtol=0, atol=1e-12)
        assert torch.equal(rank["parameters"], several[0]["parameters"]), "the ranks differ in some bit"
        if one["norm"] is not None:
            torch.testing.assert_close(rank["norm"], one["norm"], rtol=0, atol=1e-12)


def updates(values: list[float], window: int) -> list[float]:
    """What each step took off the weight."""
    weights: list[float] = []

    class Watched(ScalarWeight):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append(self.w.item())

    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(Watched(), DataLoader(torch.tensor(values), batch_size=1))
    steps = [1.0, *weights]
    return [before - after for before, after in pairwise(steps) if before != after]


@pytest.mark.parametrize(
    ("batches", "window", "expected"),
    [(5, 2, [1.0, 1.0, 1.0]), (3, 8, [1.0]), (4, 2, [1.0, 1.0]), (1, 1, [1.0]), (7, 3, [1.0, 1.0, 1.0])],
)
def test_a_short_window_is_a_mean_of_what_is_there(batches: int, window: int, expected: list[float]) -> None:
    assert updates([1.0] * batches, window) == expected
    assert run_ranks(updates, 2, [1.0] * (2 * batches), window) == [expected, expected]


def gradient_over_ranks(window: int) -> float:
    """Rank r gets x = 1 + 2r in every micro-batch; each loss is w·x."""
    task = ScalarWeight()
    trainer = quiet_trainer(max_steps=1, accumulate_grad_batches=window, use_distributed_sampler=False)
    trainer.fit(task, [torch.tensor([1.0 + 2.0 * trainer.global_rank])] * window)
    return 1.0 - task.w.item()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_gradient_is_the_mean_over_ranks_and_micro_batches(window: int) -> None:
    assert run_ranks(gradient_over_ranks, 2, window) == [2.0, 2.0]


def reductions_per_step(window: int) -> tuple[int, int]:
    """How often DDP reduced a bucket, and the optimizer steps."""
    import torch.distributed as dist
    from samestep.callbacks import Callback

    count = 0

    def counting(_, bucket):  # torch refuses other annotations than its own
        nonlocal count
        count += 1
        tensor = bucket.buffer() / dist.get_world_size()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    class Hooked(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            trainer.strategy.model.register_comm_hook(None, counting)

    trainer = quiet_trainer(max_steps=4, precision=64, accumulate_grad_batches=window, callbacks=[Hooked()])
    trainer.fit(Regression(), loader(2 * 4 * 4 * window, 4), None)
    return count, trainer.global_step


@pytest.mark.parametrize("window", [1, 2, 4])
def test_one_reduction_for_each_bucket_and_window(window: int) -> None:
    assert run_ranks(reductions_per_step, 2, window) == [(4, 4), (4, 4)]


def two_fits() -> list[float]:
    """Two fits in one process: the second wraps anew, and meets in the same process group."""
    results: list[float] = []
    for _ in range(2):
        torch.manual_seed(0)
        task = Regression()
        quiet_trainer(max_epochs=1, precision=64, seed=1).fit(task, loader(16, 4))
        results.append(parameters_of(task).sum().item())
    trainer = quiet_trainer(max_epochs=3, precision=64, seed=1)
    trainer.fit(task, loader(16, 4))
    trainer.fit(task, loader(16, 4))
    results.append(trainer.global_step)
    return results


def test_two_fits_in_one_process() -> None:
    first, second = run_ranks(two_fits, 2)
    assert first == second
    assert first[0] == first[1]
    assert first[2] == 6


class Unfreezes(Regression):
    """Its first layer is frozen in the first epoch, and its last one in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)
        self.net[2].requires_grad_(self.current_epoch < 2)


def train_unfreezing(batch_size: int) -> torch.Tensor:
    torch.manual_seed(1)
    task = Unfreezes()
    quiet_trainer(max_epochs=3, precision=64, seed=5).fit(task, loader(32, batch_size))
    return parameters_of(task)


def test_parameters_may_be_frozen_and_unfrozen_between_epochs() -> None:
    first, second = run_ranks(train_unfreezing, 2, 4)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train_unfreezing(8), rtol=0, atol=1e-12)
