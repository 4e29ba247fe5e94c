"""Number formats: what they compute, and that a step skipped anywhere is skipped everywhere, with all that moves by steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.strategies import DDPStrategy, Precision, SingleDeviceStrategy
from samestep.trainer import Task
from tasks import Regression, parameters_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def singles(samples: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1)), 4)


class Recorder(Regression):
    """Remembers the types it meets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[0](batch[0])
        self.seen = batch[0].dtype, self.net[0].weight.dtype, hidden.dtype
        return self.loss(batch)


@pytest.mark.parametrize(
    ("precision", "batch", "weight", "hidden"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("64-true", torch.float64, torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_types_of_batch_weights_and_computation(
    precision: str, batch: torch.dtype, weight: torch.dtype, hidden: torch.dtype
) -> None:
    task = Recorder()
    quiet_trainer(max_epochs=1, precision=precision).fit(task, singles())
    assert task.seen == (batch, weight, hidden)
    assert all(parameter.isfinite().all() for parameter in task.parameters())


def test_lightnings_spellings() -> None:
    spelt = {32: "32-true", "64": "64-true", "bf16": "bf16-mixed", 16: "16-mixed", "bf16-true": "bf16-true"}
    assert {value: Precision.parse(value).name for value in spelt} == spelt
    with pytest.raises(ValueError, match="precision='fp8': expected one of 32-true"):
        Precision.parse("fp8")


class WithMetric(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.register_buffer("other", torch.ones(2))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64), persistent=False)


def test_torchmetrics_keep_counting_in_float32() -> None:
    task = WithMetric()
    Precision("bf16-true").convert_module(task)
    assert task.other.dtype is torch.bfloat16
    assert task.count.dtype is torch.int64
    assert task.mean.mean_value.dtype is torch.float32
    assert "count" not in task.state_dict()


# --- skipped steps ---------------------------------------------------------------------------


class Overflows(Task):
    """Its loss is infinite in some batches, on the last rank only."""

    def __init__(self, fused: bool | None = None, ignored: bool = False) -> None:
        super().__init__()
        self.net, self.own = nn.Linear(2, 1), nn.Linear(2, 1)
        self.fused = fused
        if ignored:
            self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        bad = batch_idx in (3, 4) and self.global_rank == self.trainer.world_size - 1
        loss = (self.net(batch) + self.own(batch)).float().pow(2).mean() * 1e-3  # no other gradient overflows
        if bad:  # through the parameters that DDP leaves out, where there are such
            loss = loss + (self.own(batch) * torch.inf).sum()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def inputs() -> DataLoader[Any]:
    return DataLoader(torch.randn(32, 2, generator=torch.Generator().manual_seed(2)), 2)


def skip(options: dict[str, Any], fused: bool | None = None, ignored: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    task = Overflows(fused, ignored)
    strategy = DDPStrategy() if "RANK" in os.environ else SingleDeviceStrategy()
    trainer = quiet_trainer(max_epochs=1, precision="16-mixed", strategy=strategy, **options)
    trainer.fit(task, inputs())
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return {
        "parameters": parameters_of(task.net),
        "finite": bool(parameters_of(task).isfinite().all()),
        "step": trainer.global_step,
        "scheduled": scheduler.last_epoch,
        "moved": {int(state["step"]) for state in trainer.optimizers[0].state.values()},
        "scale": trainer.strategy.state_dict()["scaler"]["scale"],
    }


@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}])
def test_a_skipped_step_is_no_step(fused: bool | None, options: dict[str, Any]) -> None:
    result = skip(options, fused)
    assert result["step"] == result["scheduled"] == 16 - 2
    assert result["moved"] == {14}
    assert result["finite"]
    assert result["scale"] == 65536 / 4


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_step_that_one_rank_must_skip_is_skipped_by_all(options: dict[str, Any], ignored: bool) -> None:
    """Trap: torch compares nothing where the inf is in parameters that DDP ignores, and the ranks part."""
    first, second = run_ranks(skip, 2, options, None, ignored)
    assert first["step"] == second["step"] == first["scheduled"] == second["scheduled"] == 8 - 2
    assert first["scale"] == second["scale"] == 65536 / 4
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["finite"]
    assert second["finite"]


def test_a_window_with_one_infinite_micro_batch_is_one_skipped_step() -> None:
    first, second = run_ranks(skip, 2, {"accumulate_grad_batches": 2})
    assert first["step"] == second["step"] == 4 - 2  # micro-batches 3 and 4 are of two windows


class Momentum(Overflows):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=self.fused)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx + 3)  # the first two steps are skipped


def test_a_fused_sgd_whose_first_step_is_skipped_does_not_start_from_arbitrary_memory() -> None:
    """Trap: torch's fused kernel leaves the momentum it has just made without a value."""
    torch.manual_seed(0)
    task = Momentum()
    trainer = quiet_trainer(max_epochs=1, precision="16-mixed")
    trainer.fit(task, inputs())
    assert trainer.global_step == 14
    assert parameters_of(task).abs().max() < 2
    with pytest.raises(ValueError, match=r"a fused SGD: .*arbitrary memory"):
        quiet_trainer(max_epochs=1, precision="16-mixed").fit(Momentum(fused=True), inputs())


def test_gradients_are_unscaled_for_hooks_and_clipping() -> None:
    norms: list[Tensor] = []

    class Looks(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(torch.cat([p.grad.reshape(-1) for p in self.parameters() if p.grad is not None]).norm())

    trainer = quiet_trainer(max_epochs=1, precision="16-mixed", gradient_clip_val=1e-3)
    trainer.fit(Looks(), singles())
    assert all(norm < 100 for norm in norms[4:])
    assert trainer.gradient_norm is not None
    assert torch.equal(trainer.gradient_norm, norms[-1])


# --- resume ----------------------------------------------------------------------------------


def train_and_resume(folder: str, resume: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    task = Overflows()
    strategy = DDPStrategy() if "RANK" in os.environ else SingleDeviceStrategy()
    trainer = quiet_trainer(
        max_epochs=2, precision="16-mixed", strategy=strategy, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )  # fmt: skip
    first = sorted(path for path in os.listdir(folder) if path.startswith("step")) if resume else []
    trainer.fit(task, inputs(), ckpt_path=f"{folder}/{first[0]}" if resume else None)
    return {"parameters": parameters_of(task), "step": trainer.global_step, "scaler": trainer.strategy.state_dict()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_scaler_goes_on_where_it_was(tmp_path: Any, ranks: int) -> None:
    whole = run_ranks(train_and_resume, ranks, str(tmp_path), False)
    resumed = run_ranks(train_and_resume, ranks, str(tmp_path), True)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(mine["parameters"], theirs["parameters"])
        assert mine["step"] == theirs["step"]
        assert mine["scaler"] == theirs["scaler"]


# --- what can't be scaled ----------------------------------------------------------------------


def test_what_passes_over_the_scaler_is_refused() -> None:
    class Manual(Regression):
        automatic_optimization = False

    class Steps(Regression):
        def optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
            super().optimizer_step(*arguments, **keywords)

    for kind, named in ((Manual, "automatic_optimization=False"), (Steps, "optimizer_step")):
        with pytest.raises(ValueError, match=f"precision='16-mixed' with {named}"):
            quiet_trainer(max_epochs=1, precision="16-mixed").fit(kind(), singles())
