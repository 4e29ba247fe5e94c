"""Losses with a weight: the gradient of a step is that of Σ loss / Σ weight over its micro-batches and all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback
from samestep.strategies import DDPStrategy
from samestep.trainer import Task
from tasks import ScalarWeight, parameters_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Sums(Task):
    """One weight; the loss of a batch is the sum of w·x, its weight the number of x."""

    def __init__(self, as_tensor: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.as_tensor = as_tensor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not len(batch):
            return None
        weight = torch.tensor(len(batch)) if self.as_tensor else len(batch)
        return {"loss": (self.w * batch).sum(), "weight": weight}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


class Lists:
    """The batches of each rank."""

    def __init__(self, batches: list[list[list[float]]]) -> None:
        self.batches = [torch.tensor(batch, dtype=torch.float64) for batch in batches[this_rank()]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Updates(Callback):
    def __init__(self) -> None:
        self.weights = [1.0]

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.weights.append(task.w.item())


def updates(
    batches: list[list[list[float]]], accumulation: int = 1, as_tensor: bool = False, **strategy: Any
) -> list[float]:
    seen = Updates()
    trainer = quiet_trainer(
        max_epochs=1, precision="64-true", accumulate_grad_batches=accumulation, callbacks=[seen],
        strategy=DDPStrategy(**strategy),
    )  # fmt: skip
    trainer.fit(Sums(as_tensor), Lists(batches))
    return [before - after for before, after in zip(seen.weights, seen.weights[1:], strict=False)]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_each_sample_counts_once_whatever_its_rank_and_micro_batch(as_tensor: bool) -> None:
    """The mean of the ranks' means would be 6."""
    batches = [[[1.0, 2.0, 3.0]], [[10.0]]]
    assert run_ranks(updates, 2, batches, 1, as_tensor) == [pytest.approx([4.0])] * 2
    assert (
        run_ranks(updates, 2, [[[1.0, 2.0], [3.0]], [[10.0], [4.0, 4.0]]], 2, as_tensor) == [pytest.approx([4.0])] * 2
    )


def test_a_short_window_and_a_step_without_weight() -> None:
    batches = [[[1.0, 2.0], [], [3.0]], [[], [9.0], []]]
    expected = [(1 + 2 + 9) / 3, 3.0]
    assert run_ranks(updates, 2, batches, 2) == [pytest.approx(expected)] * 2
    assert run_ranks(updates, 2, [[[], [2.0]], [[], [4.0]]], 1) == [pytest.approx([0.0, 3.0])] * 2


def test_one_rank() -> None:
    assert updates([[[1.0, 2.0, 3.0], [10.0], [5.0, 6.0]]], 2) == pytest.approx([4.0, 5.5])


def join() -> list[float]:
    return updates([[[1.0]], [[3.0, 3.0], [5.0, 7.0]]], uneven_inputs="join")


def test_a_rank_without_data_has_no_weight() -> None:
    assert run_ranks(join, 2) == [pytest.approx([7 / 3, 6.0])] * 2


# --- a model of tokens ---------------------------------------------------------------------------


class Tokens(Task):
    """A classifier of tokens; how many a sentence has differs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        loss = nn.functional.cross_entropy(
            self.net(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return {"loss": loss, "weight": (targets >= 0).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Sentences:
    """`ranks` × `accumulation` micro-batches of one sentence each stand for one batch of all of them."""

    def __init__(self, sentences_in_a_batch: int, ranks: int) -> None:
        self.size, self.ranks = sentences_in_a_batch, ranks

    def __len__(self) -> int:
        return 24 // (self.size * self.ranks)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 11, (24, 9), generator=generator)
        lengths = torch.randint(1, 10, (24, 1), generator=generator)
        targets = torch.where(torch.arange(9) < lengths, tokens.roll(1, 1), -1)
        mine = list(range(24))[this_rank() :: self.ranks]
        for start in range(0, len(mine), self.size):
            chosen = mine[start : start + self.size]
            yield tokens[chosen], targets[chosen]


def train_tokens(size: int, ranks: int, options: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    task = Tokens()
    strategy = options.pop("strategy", {})
    trainer = quiet_trainer(max_epochs=2, strategy=DDPStrategy(**strategy), **{"precision": "64-true", **options})
    trainer.fit(task, Sentences(size, ranks))
    return parameters_of(task)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"strategy": {"static_graph": True}}])
def test_ranks_and_windows_train_what_one_rank_trains_on_the_whole_batch(options: dict[str, Any]) -> None:
    whole = train_tokens(6, 1, dict(options))
    first, second = run_ranks(train_tokens, 2, 1, 2, {**options, "accumulate_grad_batches": 3})
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12)


def clipped_and_scaled(limit: float | None) -> list[float]:
    """Updates at 16-mixed, where all numbers are exact in float32; the first scale is 2**16."""
    batches = [[[1.0, 2.0], [3.0], [8.0]], [[10.0], [4.0, 4.0], []]]
    seen = Updates()
    trainer = quiet_trainer(
        max_epochs=1, precision="16-mixed", accumulate_grad_batches=2, callbacks=[seen], gradient_clip_val=limit,
        strategy=DDPStrategy(),
    )  # fmt: skip
    trainer.fit(Sums().float(), Lists(batches))
    return [before - after for before, after in zip(seen.weights, seen.weights[1:], strict=False)]


def test_a_scaled_step_is_brought_to_its_weights_before_it_is_clipped() -> None:
    """24 over 6 tokens, then 8 over 1: a limit of 5 touches the second only."""
    assert run_ranks(clipped_and_scaled, 2, None) == [pytest.approx([4.0, 8.0], abs=1e-5)] * 2
    assert run_ranks(clipped_and_scaled, 2, 5.0) == [pytest.approx([4.0, 5.0], abs=1e-5)] * 2


def test_what_a_skipped_rest_of_an_epoch_has_weighed_is_forgotten() -> None:
    class Skips(Sums):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    seen = Updates()
    trainer = quiet_trainer(max_epochs=2, precision="64-true", accumulate_grad_batches=2, callbacks=[seen])
    trainer.fit(Skips(), Lists([[[1.0], [2.0, 3.0], [100.0, 100.0], [4.0]]]))
    updates = [before - after for before, after in zip(seen.weights, seen.weights[1:], strict=False)]
    assert updates == pytest.approx([2.0, 0.0, 2.0, 68.0])


def steps_and_weights(precision: str) -> tuple[int, Tensor]:
    torch.manual_seed(0)
    task = Tokens()
    trainer = quiet_trainer(max_epochs=5, precision=precision)
    trainer.fit(task, Sentences(3, 2))
    return trainer.global_step, parameters_of(task)


def test_scaled_losses_stay_in_range() -> None:
    """A sum of losses is larger than a mean; but for the first steps, what is scaled is about a mean."""
    (steps, first), (_, second) = run_ranks(steps_and_weights, 2, "16-mixed")
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert steps >= 20 - 2


# --- what can't be weighted ------------------------------------------------------------------------


class Sometimes(Sums):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        plain = batch_idx == 1 if self.as_tensor else this_rank() == 1
        return output["loss"] if plain else output


def sometimes(in_time: bool) -> None:
    quiet_trainer(max_epochs=1, precision=64).fit(Sometimes(in_time), Lists([[[1.0], [2.0]]] * 2))


def test_weights_in_some_micro_batches_or_on_some_ranks_only_are_an_error() -> None:
    for error in errors_of_ranks(sometimes, 2, True):
        assert 'a loss with a "weight" in some micro-batches only' in error
    for error in errors_of_ranks(sometimes, 2, False):
        assert "on some ranks only (rank 0: yes, rank 1: no)" in error


def wrong(weight: Any) -> None:
    class Wrong(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).sum(), "weight": weight}

    quiet_trainer(max_epochs=1, precision=64).fit(Wrong(), Lists([[[1.0]]]))


def test_a_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="the loss's weight is a str: expected a number"):
        wrong("3")
    with pytest.raises(TypeError, match=r"the loss's weight has shape \[2\]: expected a scalar"):
        wrong(torch.ones(2))


def weighted_once(weight: Any) -> list[float]:
    """The parameter after steps whose first has this weight on rank 0, the others the number of samples."""

    class Once(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first = batch_idx == 0 and this_rank() == 0
            return {"loss": (self.w * batch).sum(), "weight": weight if first else len(batch)}

    seen, batches = Updates(), [[[1.0], [2.0]]] * 2
    quiet_trainer(max_epochs=1, precision=64, callbacks=[seen]).fit(Once(), Lists(batches))
    return seen.weights


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), torch.tensor(float("nan")), torch.tensor(-1.0)])
def test_a_weight_that_is_no_amount_is_seen_in_the_gradients_of_all_ranks(weight: Any) -> None:
    for after in run_ranks(weighted_once, 2, weight):
        assert after[1] != after[1], "NaN, and not a step without a gradient"


def test_a_number_below_zero_is_no_weight() -> None:
    with pytest.raises(
        ValueError, match=r"the loss's weight is -1: expected what the loss is a sum over, zero or more"
    ):
        wrong(-1)


def test_the_step_after_a_huge_weight_has_its_whole_gradient() -> None:
    class Huge(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).sum().float(), "weight": 1e300 if batch_idx == 0 else len(batch)}

    seen = Updates()
    quiet_trainer(max_epochs=1, precision=64, callbacks=[seen]).fit(Huge(), Lists([[[1.0], [2.0]]]))
    assert seen.weights == pytest.approx([1.0, 1.0, -1.0])


@pytest.mark.parametrize("lever", [{"optimizer_in_backward": True}, {"comm_hook": "post_local_sgd"}])
def test_levers_that_use_gradients_before_the_weights_are_known_are_refused(lever: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=f'a loss with a "weight" and .*{next(iter(lever.values())) if "comm_hook" in lever else "optimizer_in_backward"}',
    ):
        updates([[[1.0]]], **lever)


def test_a_key_that_is_all_but_the_weight_is_refused() -> None:
    class Misspelt(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.w.sum(), "weights": 2, "height": 3}

    with pytest.raises(
        ValueError, match=r"Misspelt\.training_step returns 'weights' beside the loss: expected 'weight'"
    ):
        quiet_trainer(max_epochs=1).fit(Misspelt(), DataLoader(torch.ones(4), 2))
