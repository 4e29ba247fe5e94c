"""Ranks whose loaders end at different times: stop together, go on together, or a clear error; always in step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.strategies import DDPStrategy
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import Tensor, nn


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Stream:
    """Rank r gives so many batches of the number 1 + 2r; without a length unless it is asked for."""

    def __init__(self, batches: list[int]) -> None:
        self.batches = batches[this_rank()]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([1.0 + 2 * this_rank()])] * self.batches)


class Sized(Stream):
    def __len__(self) -> int:
        return self.batches


class Updates(Callback):
    """The weight after each step."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.weights.append(round(task.w.item(), 6))


def updates_of(
    kind: type[Stream], batches: list[int], accumulation: int, epochs: int, options: dict[str, Any]
) -> list[float]:
    seen = Updates()
    trainer = quiet_trainer(
        max_epochs=epochs, strategy=DDPStrategy(**options), callbacks=[seen], accumulate_grad_batches=accumulation,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(ScalarWeight(), kind(batches))
    return [before - after for before, after in zip([1.0, *seen.weights], seen.weights, strict=False)]


@pytest.mark.parametrize("kind", [Stream, Sized])
@pytest.mark.parametrize(
    ("options", "accumulation", "expected"),
    [
        ({"uneven_inputs": "stop"}, 1, [2, 2]),
        ({"uneven_inputs": "join"}, 1, [2, 2, 3, 3]),
        ({"uneven_inputs": "join", "uneven_divisor": "initial"}, 1, [2, 2, 1.5, 1.5]),
        ({"uneven_inputs": "join"}, 2, [2, 3]),
        ({"uneven_inputs": "join"}, 3, [(1 + 1 + 3 + 3 + 3) / 5, 3]),
        ({"uneven_inputs": "join", "uneven_divisor": "initial"}, 3, [(1 + 1 + 3 + 3 + 3) / 6, 1.5]),
        ({"uneven_inputs": "stop"}, 3, [2]),
    ],
)
def test_each_gradient_is_the_mean_over_what_is_there(
    kind: type[Stream], options: dict[str, Any], accumulation: int, expected: list[float]
) -> None:
    for seen in run_ranks(updates_of, 2, kind, [2, 4], accumulation, 2, options):
        assert seen == pytest.approx(expected * 2)


def test_loaders_without_a_length_stop_together_by_default() -> None:
    for seen in run_ranks(updates_of, 2, Stream, [3, 2], 1, 1, {}):
        assert seen == [2, 2]


def test_a_rank_without_any_data_joins() -> None:
    for seen in run_ranks(updates_of, 2, Sized, [0, 2], 1, 1, {"uneven_inputs": "join"}):
        assert seen == [3, 3]


def test_three_ranks_that_end_one_after_the_other() -> None:
    for seen in run_ranks(updates_of, 3, Stream, [3, 1, 2], 1, 1, {"uneven_inputs": "join"}):
        assert seen == pytest.approx([3, 3, 1])  # (1+3+5)/3, (1+5)/2, 1


def test_lengths_that_differ_are_an_error_by_default() -> None:
    for error in errors_of_ranks(updates_of, 2, Sized, [2, 4], 1, 1, {}):
        assert "rank 0: 2, rank 1: 4 batches" in error
        assert "uneven_inputs='stop'" in error


def test_a_loader_without_a_length_can_be_refused() -> None:
    for error in errors_of_ranks(updates_of, 2, Stream, [2, 2], 1, 1, {"uneven_inputs": "error"}):
        assert "has no length" in error


# --- everything else stays in step -----------------------------------------------------------


class Batches:
    """So many batches of Regression on each rank."""

    def __init__(self, batches: list[int], dtype: torch.dtype = torch.float64) -> None:
        every = [[part.to(dtype) for part in batch] for batch in loader(4 * max(batches), 4)]
        self.batches = every[: batches[this_rank()]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Full(Regression):
    """With BatchNorm, an optimizer that counts steps, a scheduler, and values logged in every way."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.zero = zero
        self.batches_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches_seen += 1
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("count", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns of a deprecation

            optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Average(Callback):
    """An exponential average of the weights, moved with each optimizer step."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        now = parameters_of(task).clone()
        self.value = now if self.value is None else 0.9 * self.value + 0.1 * now

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict["value"]


def train_uneven(batches: list[int], options: dict[str, Any], zero: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    task, average = Full(zero), Average()
    trainer = quiet_trainer(
        max_epochs=2, strategy=DDPStrategy(uneven_inputs="join"), callbacks=[average], log_every_n_steps=1,
        val_check_interval=3 if "val" in options else None, check_val_every_n_epoch=None if "val" in options else 1,
        **{"precision": "64-true", **{key: value for key, value in options.items() if key != "val"}},
    )  # fmt: skip
    dtype = torch.float32 if "precision" in options else torch.float64
    trainer.fit(task, Batches(batches, dtype), loader(8, 4) if "val" in options else None)
    return {
        "parameters": parameters_of(task),
        "buffers": torch.cat([buffer.double().reshape(-1) for buffer in task.buffers()]),
        "optimizer": []
        if zero
        else [part for state in trainer.optimizers[0].state.values() for part in state.values()],
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "average": average.value,
        "step": trainer.global_step,
        "progress": {name: count for name, count in trainer.progress.state_dict().items() if name != "batches_seen"},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "scale": trainer.strategy.state_dict(),
        "seen": task.batches_seen,
    }


def assert_in_step(results: list[dict[str, Any]], *, but: tuple[str, ...] = ("seen",)) -> None:
    first = results[0]
    for other in results[1:]:
        for name in first.keys() - set(but):
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        ([3, 6], {}),
        ([6, 3], {"val": True}),
        ([1, 5], {"val": True}),
        ([0, 4], {"gradient_clip_val": 0.1}),
        ([3, 7], {"accumulate_grad_batches": 2}),
        ([7, 3], {"accumulate_grad_batches": 3, "val": True}),
    ],
)
def test_after_a_join_everything_is_in_step(batches: list[int], options: dict[str, Any]) -> None:
    results = run_ranks(train_uneven, 2, batches, options)
    assert_in_step(results)
    assert [result["seen"] for result in results] == [2 * count for count in batches]
    window = options.get("accumulate_grad_batches", 1)
    assert results[0]["step"] == 2 * -(-max(batches) // window)
    assert results[0]["metrics"]["count"] == sum(batches)


def test_the_scaler_is_in_step_after_a_join() -> None:
    results = run_ranks(train_uneven, 2, [2, 6], {"precision": "16-mixed"})
    assert_in_step(results)
    assert results[0]["scale"]["scaler"]["scale"] > 0


def test_the_buffers_are_those_of_a_rank_that_had_data_to_the_end() -> None:
    """Rank 0 ends first: its running statistics would be those of its own few batches."""
    few, many = run_ranks(train_uneven, 2, [1, 6], {})
    assert torch.equal(few["buffers"], many["buffers"])
    tracked = few["buffers"][-1]  # num_batches_tracked
    assert tracked == 12


def test_a_sharded_optimizer_joins_like_any_other() -> None:
    """With torch's Join, ZeroRedundancyOptimizer goes on with stale gradients, silently."""
    sharded, _ = run_ranks(train_uneven, 2, [2, 5], {}, True)
    plain, _ = run_ranks(train_uneven, 2, [2, 5], {}, False)
    torch.testing.assert_close(sharded["parameters"], plain["parameters"], rtol=0, atol=1e-12)


def save_in_the_tail(folder: str, resume: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    task = Full()
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=2, strategy=DDPStrategy(uneven_inputs="join"), callbacks=[checkpoint], enable_checkpointing=True,
        precision="64-true", default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(task, Batches([2, 5]), ckpt_path=f"{folder}/step-00000004" if resume else None)
    return {
        "parameters": parameters_of(task),
        "buffers": torch.cat([buffer.double().reshape(-1) for buffer in task.buffers()]),
        "seen": task.batches_seen,
    }


def test_a_checkpoint_taken_when_a_rank_has_ended_resumes_exactly(tmp_path: Any) -> None:
    whole = run_ranks(save_in_the_tail, 2, str(tmp_path), False)
    resumed = run_ranks(save_in_the_tail, 2, str(tmp_path), True)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(mine["parameters"], theirs["parameters"])
        assert torch.equal(mine["buffers"], theirs["buffers"])
    assert [result["seen"] for result in resumed] == [2, 6]


def stop_inside_the_tail() -> float:
    task = ScalarWeight()
    trainer = quiet_trainer(max_epochs=5, max_steps=3, strategy=DDPStrategy(uneven_inputs="join"))
    trainer.fit(task, Stream([2, 4]))
    trainer.fit(task, Stream([2, 4]))  # nothing to do: no collective of the first may be left over
    return task.w.item()


def test_a_run_that_ends_inside_the_tail_leaves_nothing_behind() -> None:
    assert run_ranks(stop_inside_the_tail, 2) == [1 - 2 - 2 - 3] * 2


def loss_of_last_step(interval: int) -> tuple[float, list[float]]:
    last: list[float] = []

    class Watched(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            last[:] = [loss.item()]
            return loss

    torch.manual_seed(0)
    trainer = quiet_trainer(
        max_epochs=1, strategy=DDPStrategy(uneven_inputs="join"), log_every_n_steps=interval, precision="64-true"
    )
    trainer.fit(Watched(), Batches([2, 5]))
    return trainer.callback_metrics["train/loss"].item(), last


@pytest.mark.parametrize("interval", [2, 4, 5, 50])
def test_step_values_at_an_epochs_end_are_of_the_ranks_that_had_data(interval: int) -> None:
    """Rank 0 has none in steps 3 to 5, also where a step that logs lies between (4)."""
    (seen, _), (also_seen, last) = run_ranks(loss_of_last_step, 2, interval)
    assert seen == also_seen == last[0]


# --- what can't join -------------------------------------------------------------------------


class Gathers(ScalarWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch)
        return super().training_step(batch, batch_idx)


def gather_in_a_step() -> None:
    quiet_trainer(max_epochs=1, strategy=DDPStrategy(uneven_inputs="join")).fit(Gathers(), Stream([2, 2]))


def test_a_collective_in_the_step_is_refused_with_join() -> None:
    for error in errors_of_ranks(gather_in_a_step, 2):
        assert "all_gather in a training step with uneven_inputs='join'" in error


@pytest.mark.parametrize("lever", [{"sync_batchnorm": True}, {"static_graph": True}, {"comm_hook": "post_local_sgd"}])
def test_what_would_break_a_join_is_refused_at_construction(lever: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"uneven_inputs='join' and .*{next(iter(lever))}.* can't go together"):
        DDPStrategy(uneven_inputs="join", **lever)
