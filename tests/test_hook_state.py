"""The state of a communication hook in a run: it survives a new wrapper, and is resumed exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.strategies import DDPStrategy
from samestep.strategies.comm_hooks import CommHook, PostLocalSGD, PowerSGD
from tasks import Regression, loader, parameters_of, quiet_trainer
from torch import Tensor, nn


class Deep(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


HOOKS = {
    "powersgd": lambda: PowerSGD(rank=2, start_step=3),
    "post_local_sgd": lambda: PostLocalSGD(start_step=2, period=3, ranks_per_node=1),
}


def train(name: str, folder: str, resume: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    task, hook = Deep(), HOOKS[name]()
    trainer = quiet_trainer(
        max_epochs=3, precision=64, strategy=DDPStrategy(comm_hook=hook, bucket_cap_mb=0.001), enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(task, loader(32, 2), ckpt_path=f"{folder}/step-00000008" if resume else None)
    return {"parameters": parameters_of(task), "step": trainer.global_step}


@pytest.mark.parametrize("name", list(HOOKS))
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(name: str, tmp_path: Any) -> None:
    whole = run_ranks(train, 2, name, str(tmp_path), False)
    resumed = run_ranks(train, 2, name, str(tmp_path), True)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine["step"] == theirs["step"]
        assert torch.equal(mine["parameters"], theirs["parameters"])
    assert torch.equal(whole[0]["parameters"], whole[1]["parameters"])


class Frozen(Deep):
    """Its first layer is trained from the second epoch on, so the model is wrapped anew there."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def unfreeze() -> tuple[bool, Tensor]:
    torch.manual_seed(0)
    task, hook = Frozen(), PowerSGD(rank=2, start_step=0)
    seen: list[Any] = []

    class Looks(Frozen):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            seen.append({name: error.clone() for name, error in hook.errors.items()})

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 1 and batch_idx == 0:
                seen.append({name: error.clone() for name, error in hook.errors.items()})

    task = Looks()
    quiet_trainer(max_epochs=2, precision=64, strategy=DDPStrategy(comm_hook=hook)).fit(task, loader(16, 2))
    before, after = seen[1], seen[2]
    kept = bool(before) and all(torch.equal(after[name], error) for name, error in before.items())
    return kept, parameters_of(task)


def test_a_new_wrapper_keeps_the_state() -> None:
    first, second = run_ranks(unfreeze, 2)
    assert first[0]
    assert second[0]
    assert torch.equal(first[1], second[1])


def fit_again() -> int:
    hook: CommHook = PowerSGD(rank=2, start_step=0)
    for _ in range(2):
        trainer = quiet_trainer(max_epochs=1, precision=64, strategy=DDPStrategy(comm_hook=hook))
        trainer.fit(Deep(), loader(8, 2))
    return trainer.global_step


def test_a_hook_may_serve_one_run_after_the_other() -> None:
    assert run_ranks(fit_again, 2) == [2, 2]
