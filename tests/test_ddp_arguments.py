"""The arguments of DDP: passed on, explained where they can't be, and none of them parts the ranks."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import errors_of_ranks, run_ranks
from samestep.strategies import DDPStrategy
from samestep.trainer import Task
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def train(options: dict[str, Any], seed: int | None = 0, accumulation: int = 1) -> dict[str, Any]:
    if seed is not None:
        torch.manual_seed(seed)
    task = Normalized()
    seen: dict[str, Any] = {}

    class Looks(Normalized):
        def on_train_end(self) -> None:
            strategy: Any = self.trainer.strategy
            seen.update(strategy.describe())
            seen["view"] = all(p.grad._is_view() for p in self.parameters() if p.grad is not None)
            seen["model"] = type(strategy.model)

    task = Looks()
    trainer = quiet_trainer(
        max_epochs=1, precision=64, strategy=DDPStrategy(**options), accumulate_grad_batches=accumulation
    )
    trainer.fit(task, loader(40, 2), loader(6, 2))
    return {"parameters": parameters_of(task), "running": task.net[1].running_mean.clone(), **seen}


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb_list": [0.0001, 0.0005]},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"batched_grad_copy": True},
        {"init_sync": False},
    ],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_argument_changes_the_training(options: dict[str, Any], accumulation: int) -> None:
    """Trap among them: static_graph with no_sync in the first micro-batch is an internal error of torch."""
    plain = run_ranks(train, 2, {}, 0, accumulation)
    other = run_ranks(train, 2, options, 0, accumulation)
    torch.testing.assert_close(other[0]["parameters"], plain[0]["parameters"], rtol=0, atol=1e-12)
    assert torch.equal(other[0]["parameters"], other[1]["parameters"])
    assert torch.equal(other[0]["running"], other[1]["running"])


def test_the_arguments_reach_ddp() -> None:
    assert run_ranks(train, 2, {})[0]["buckets"].startswith("1 (")
    assert run_ranks(train, 2, {"bucket_cap_mb": 0.0001})[0]["buckets"].startswith("3 (")
    assert run_ranks(train, 2, {})[0]["view"]
    assert not run_ranks(train, 2, {"gradient_as_bucket_view": False})[0]["view"]


def test_buffers_that_no_forward_synchronizes_are_equal_when_evaluation_ends() -> None:
    """Trap: without the broadcast each rank has running statistics of its own."""
    first, second = run_ranks(train, 2, {"forward_sync_buffers": False})
    assert torch.equal(first["running"], second["running"])


def test_init_sync_is_left_out_only_where_the_ranks_are_equal() -> None:
    for error in errors_of_ranks(train_from_own_seed, 2):
        assert "the ranks hold different weights" in error


def train_from_own_seed() -> None:
    train({"init_sync": False}, seed=this_rank())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: expected MiB above 0"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1: expected MiB above 0"),
        ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list"),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket_cap_mb_list"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, "bucket_cap_mb and bucket_cap_mb_list"),
        ({"static_graph": True, "find_unused_parameters": True}, "static_graph and find_unused_parameters"),
        ({"timeout": timedelta(0)}, "timeout=datetime.timedelta(0): expected a timedelta above 0"),
        ({"startup_timeout": timedelta(seconds=-1)}, "startup_timeout"),
        ({"uneven_inputs": "pad"}, "uneven_inputs='pad': expected one of 'error', 'stop', 'join'"),
        ({"uneven_divisor": "mean"}, "uneven_divisor='mean'"),
        ({"fused_optimizer": "yes"}, "fused_optimizer='yes'"),
        ({"comm_hook": "fp61"}, "Did you mean 'fp16'"),
        ({"comm_hook_state": 1}, "comm_hook"),
    ],
)
def test_wrong_values_and_pairs_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DDPStrategy(**options)


@pytest.mark.parametrize("name", ["static_graph", "optimizer_in_backward"])
def test_levers_that_manual_optimization_excludes(name: str) -> None:
    class Manual(Regression):
        automatic_optimization = False

    with pytest.raises(ValueError, match=f"{name} and automatic_optimization=False can't go together"):
        quiet_trainer(strategy=DDPStrategy(**{name: True})).fit(Manual(), loader(8, 4))


# --- a mesh --------------------------------------------------------------------------------------


def train_on_a_mesh(ranks: int) -> torch.Tensor:
    mesh = dist.device_mesh.DeviceMesh("cpu", list(range(ranks)))
    return train({"device_mesh": mesh})["parameters"]


def test_a_mesh_of_all_ranks_stands_for_the_process_group() -> None:
    assert torch.equal(run_ranks(train_on_a_mesh, 2, 2)[0], run_ranks(train, 2, {})[0]["parameters"])


def train_on_a_part() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    train({"device_mesh": mesh["b"]})


def test_a_mesh_of_some_ranks_is_refused() -> None:
    for error in errors_of_ranks(train_on_a_part, 2):
        assert "device_mesh holds 1 of the run's 2 ranks" in error


# --- the dry run ---------------------------------------------------------------------------------


class Experts(Task):
    """Two experts, one for each rank; and a layer that nobody uses."""

    def __init__(self, own: bool, spare: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        self.spare = nn.Linear(2, 1, bias=False) if spare else None
        self.own = own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        expert = self.second if self.own and (self.global_rank + batch_idx) % 2 else self.first
        loss = expert(batch).pow(2).mean()
        return loss if self.own else loss + self.second(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


def train_experts(own: bool, spare: bool, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    task = Experts(own, spare)
    inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    quiet_trainer(max_epochs=1, strategy=DDPStrategy(**options)).fit(task, DataLoader(inputs, 1))
    return parameters_of(task)


def test_parameters_that_some_ranks_do_not_use_are_named_with_the_ranks_and_the_switch() -> None:
    for error in errors_of_ranks(train_experts, 2, True, True, {}):
        assert "spare.weight" in error
        assert "first.weight (on rank 1)" in error
        assert "second.weight (on rank 0)" in error
        assert "find_unused_parameters=True" in error


def test_ranks_that_use_other_parameters_train_right_when_they_are_found() -> None:
    first, second = run_ranks(train_experts, 2, True, True, {"find_unused_parameters": True})
    assert torch.equal(first, second)
    torch.manual_seed(0)
    task = Experts(True, True)
    optimizer = task.configure_optimizers()
    inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            expert = task.second if (rank + step) % 2 else task.first
            (expert(inputs[2 * step + rank : 2 * step + rank + 1]).pow(2).mean() / 2).backward()
        optimizer.step()  # what nobody used has no gradient, and no weight decay moves it
    torch.testing.assert_close(first, parameters_of(task))


def test_a_static_graph_passes_over_what_is_never_used() -> None:
    first, second = run_ranks(train_experts, 2, False, True, {"static_graph": True})
    assert torch.equal(first, second)
    for error in errors_of_ranks(train_experts, 2, True, False, {"static_graph": True}):
        assert "second.weight (on rank 0)" in error


# --- manual optimization ---------------------------------------------------------------------------


class ByHand(ScalarWeight):
    automatic_optimization = False

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.w * batch * (1 + 2 * self.global_rank)).mean()
        if self.plain:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()


def by_hand(plain: bool) -> float:
    task = ByHand(plain)
    quiet_trainer(max_epochs=1).fit(task, DataLoader(torch.ones(4), 1))
    return task.w.item()


def test_a_plain_backward_in_manual_optimization_is_refused_on_several_ranks() -> None:
    for error in errors_of_ranks(by_hand, 2, True):
        assert "expected self.manual_backward(loss)" in error
    assert run_ranks(by_hand, 2, False) == [1 - 2 * 2.0] * 2
    assert by_hand(True) == 1 - 4 * 1.0  # alone there is nothing to average


# --- steps that say nothing --------------------------------------------------------------------------


def test_an_optimizer_step_that_does_not_say_whether_it_stepped_is_refused() -> None:
    class Forgets(DDPStrategy):
        def optimizer_step(self, optimizer: Any) -> Any:
            super().optimizer_step(optimizer)

    with pytest.raises(TypeError, match=r"Forgets.optimizer_step returned None: expected True"):
        quiet_trainer(max_epochs=1, precision=64, strategy=Forgets()).fit(Regression(), loader(8, 4))


# --- timeouts ----------------------------------------------------------------------------------------


class Slow(ScalarWeight):
    """A rank is late: in its first step, or in a later one."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == self.late:
            import time

            time.sleep(4)
        return super().training_step(batch, batch_idx)


def be_late(late: int) -> int:
    strategy = DDPStrategy(timeout=timedelta(seconds=2), startup_timeout=timedelta(seconds=60))
    trainer = quiet_trainer(max_epochs=1, strategy=strategy)
    trainer.fit(Slow(late), DataLoader(torch.ones(12), 1))
    return trainer.global_step


def test_the_first_step_may_take_longer_than_the_later_ones() -> None:
    assert run_ranks(be_late, 2, 0) == [6, 6]
    errors = errors_of_ranks(be_late, 2, 3)
    assert "rank 1: stuck, or slower than the timeout" in errors[0]


# --- what must not be nested ---------------------------------------------------------------------------


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    for error in errors_of_ranks(wrap_twice, 2):
        assert "holds a DistributedDataParallel already" in error


def wrap_twice() -> None:
    task = Regression()
    task.net = DistributedDataParallel(task.net)  # pyright: ignore[reportAttributeAccessIssue]
    quiet_trainer(max_epochs=1).fit(task, loader(8, 4))
