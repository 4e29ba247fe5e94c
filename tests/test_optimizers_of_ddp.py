"""Optimizers under DDP: fused kernels, and updates inside the backward, bit-equal to the plain loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.strategies import DDPStrategy, SingleDeviceStrategy
from samestep.strategies.fused import is_fused
from samestep.trainer import Task
from tasks import Regression, loader, parameters_of, quiet_trainer
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


class Optimized(Regression):
    """Two groups with their own learning rates, and a scheduler by steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_end(self) -> None:
        self.described = self.trainer.strategy.describe()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.net[0].weight, self.net[2].bias]},
            {"params": [self.net[0].bias, self.net[2].weight], "lr": 0.02},
        ]
        optimizer = OPTIMIZERS[self.kind](groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(kind: str, options: dict[str, Any], folder: str = "", ckpt: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    task = Optimized(kind)
    callbacks: list[Any] = [ModelCheckpoint(folder, save_top_k=-1)] if folder else []
    trainer = quiet_trainer(
        max_epochs=2, precision="64-true", strategy=DDPStrategy(bucket_cap_mb=0.0001, **options), callbacks=callbacks,
        enable_checkpointing=bool(folder),
    )  # fmt: skip
    trainer.fit(task, loader(32, 2), ckpt_path=ckpt)
    (optimizer,) = trainer.optimizers
    return {
        "parameters": parameters_of(task),
        "state": optimizer.state_dict()["state"],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "step": trainer.global_step,
        "described": task.described,
    }


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_updates_inside_the_backward_are_the_plain_ones_bit_by_bit(kind: str) -> None:
    plain = run_ranks(train, 2, kind, {"fused_optimizer": False})
    inside = run_ranks(train, 2, kind, {"fused_optimizer": False, "optimizer_in_backward": True})
    for mine, theirs in zip(inside, plain, strict=True):
        for name in ("parameters", "state", "rates", "step"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0)
    assert torch.equal(inside[0]["parameters"], inside[1]["parameters"])


def test_a_run_may_change_to_updates_inside_the_backward(tmp_path: Any) -> None:
    """The state dict has the layout it always has: either way resumes from the other."""
    whole, _ = run_ranks(train, 2, "AdamW", {}, str(tmp_path / "whole"))
    ckpt = str(tmp_path / "whole" / "step-00000008")
    resumed, _ = run_ranks(train, 2, "AdamW", {"optimizer_in_backward": True}, str(tmp_path / "resumed"), ckpt)
    for name in ("parameters", "state", "rates", "step"):
        torch.testing.assert_close(resumed[name], whole[name], rtol=0, atol=0)


class Coupled(torch.optim.SGD):
    """Counts in its groups, as some optimizers that estimate their learning rate do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class WithCoupled(Regression):
    def configure_optimizers(self) -> Any:
        return Coupled(self.parameters(), lr=0.1)


class WithLBFGS(Regression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def train_inside(kind: type[Task]) -> None:
    quiet_trainer(max_epochs=1, precision=64, strategy=DDPStrategy(optimizer_in_backward=True)).fit(
        kind(), loader(8, 2)
    )


def test_optimizers_that_couple_their_parameters_are_refused() -> None:
    for error in errors_of_ranks(train_inside, 2, WithCoupled):
        assert "Coupled.step changes count of its groups" in error
    for error in errors_of_ranks(train_inside, 2, WithLBFGS):
        assert "optimizer_in_backward and automatic_optimization=False" in error


@pytest.mark.parametrize(
    ("strategy", "trainer", "other"),
    [
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({}, {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ({}, {"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"find_unused_parameters": True}, {}, "find_unused_parameters"),
        ({"gradient_as_bucket_view": False}, {}, "gradient_as_bucket_view=False"),
        ({"comm_hook": "post_local_sgd"}, {}, "post_local_sgd"),
    ],
)
def test_what_an_update_inside_the_backward_excludes(
    strategy: dict[str, Any], trainer: dict[str, Any], other: str
) -> None:
    with pytest.raises(ValueError, match=f"optimizer_in_backward and .*{other}.* can't go together"):
        quiet_trainer(strategy=DDPStrategy(optimizer_in_backward=True, **strategy), **trainer)


HOOKS = ["configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward", "optimizer_step"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_task_that_may_change_gradients_is_refused_with_updates_inside_the_backward(hook: str) -> None:
    kind = type("Changes", (Regression,), {hook: lambda self, *arguments: None})
    with pytest.raises(ValueError, match=rf"optimizer_in_backward with Changes.{hook}"):
        train_inside(kind)


# --- fused kernels ---------------------------------------------------------------------------


def build(optimizer: torch.optim.Optimizer, module: nn.Module, wanted: Any) -> bool:
    strategy = SingleDeviceStrategy(fused_optimizer=wanted)
    strategy.prepare_optimizers([optimizer], module)
    return is_fused(optimizer)


def test_fused_kernels_are_used_where_torch_has_one() -> None:
    layer = nn.Linear(2, 2)
    assert build(torch.optim.SGD(layer.parameters(), lr=0.1), layer, "auto")
    for kind in ("Adam", "AdamW", "Adagrad"):
        assert build(OPTIMIZERS[kind](layer.parameters()), layer, "auto"), kind
    for kind in ("SGD", "AdamW foreach", "RMSprop", "NAdam", "Adafactor"):  # this SGD has momentum
        assert not build(OPTIMIZERS[kind](layer.parameters()), layer, "auto"), kind
    assert not build(torch.optim.AdamW(layer.parameters(), fused=False), layer, "auto")
    assert not build(torch.optim.AdamW(layer.parameters()), layer, False)
    assert not build(Coupled(layer.parameters(), lr=0.1), layer, "auto")
    embedding = nn.Embedding(3, 2, sparse=True)
    assert not build(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding, "auto")


@pytest.mark.parametrize("kind", ["RMSprop", "AdamW foreach", "SGD"])
def test_a_fused_kernel_that_is_wanted_and_missing_is_an_error(kind: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"fused_optimizer=True, but .* can't be fused: "):
        build(OPTIMIZERS[kind](layer.parameters()), layer, True)


@pytest.mark.parametrize("kind", ["plain SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_kernel_computes_the_same_update(kind: str) -> None:
    os.environ.pop("RANK", None)
    plain = train(kind, {"fused_optimizer": False})
    fused = train(kind, {"fused_optimizer": True})
    torch.testing.assert_close(fused["parameters"], plain["parameters"], rtol=1e-12, atol=1e-12)
    assert fused["described"]["optimizer"] == f"{kind.removeprefix('plain ')}, fused"
    assert "optimizer" not in plain["described"]


class Later(Regression):
    """Its first layer is trained from the second epoch on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.kind](self.parameters())


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_a_parameter_may_get_its_first_gradient_later(kind: str) -> None:
    """Trap: torch's fused SGD with momentum fails here."""
    task = Later(kind)
    before = task.net[0].weight.clone().double()
    quiet_trainer(max_epochs=2, precision=64).fit(task, loader(16, 4))
    assert not torch.equal(task.net[0].weight, before)


def test_a_resumed_run_keeps_the_kernel_it_began_with(tmp_path: Any) -> None:
    whole = train("AdamW", {"fused_optimizer": False}, str(tmp_path / "whole"))
    resumed = train("AdamW", {}, str(tmp_path / "resumed"), str(tmp_path / "whole" / "step-00000016"))
    assert torch.equal(resumed["parameters"], whole["parameters"])
