"""A run resumed at any point is the run that was never stopped, bit by bit, on any number of ranks: see `resume_cases.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from resume_cases import CASES, differences
from run_ranks import run_ranks
from samestep.callbacks import Callback
from samestep.strategies import DDPStrategy
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

# Buckets matter from three ranks on, so the cases run there; on fewer those where a fault could be another one.
ON_THREE = tuple(name for name in CASES if name != "workers")
ON_TWO = ("plain", "workers", "accumulate", "hook quantize8", "hook powersgd", "join", "manual")
ON_ONE = ("plain", "fp16", "intervals", "weighted")


def compare(names: list[str], folder: str) -> list[str]:
    return differences(names, folder, lambda: int(os.environ["RANK"]))


@pytest.mark.timeout(650)
@pytest.mark.parametrize(("ranks", "names"), [(3, ON_THREE), (2, ON_TWO), (1, ON_ONE)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    found = run_ranks(compare, ranks, list(names), str(tmp_path), timeout=600)
    assert [difference for each in found for difference in each] == []


# --- buckets -----------------------------------------------------------------------------------


class Deep(Regression):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).calls += 1
        return super().training_step(batch, batch_idx)


class Layout(Callback):
    """The buckets in the first step of a run."""

    def __init__(self) -> None:
        self.buckets: list[str | None] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint("one")

    def on_before_backward(self, trainer: Any, task: Any, loss: Tensor) -> None:
        self.buckets.append(trainer.strategy.model._get_ddp_logging_data().get("rebuilt_bucket_sizes"))


def layouts(folder: str) -> tuple[str | None, str | None, int]:
    os.chdir(folder)
    shown: list[str | None] = []
    for path in (None, "one"):
        layout = Layout()
        strategy = DDPStrategy(bucket_cap_mb=0.0001)
        Deep.calls = 0
        quiet_trainer(max_epochs=1, strategy=strategy, callbacks=[layout], precision=64).fit(
            Deep(), loader(12, 2), ckpt_path=path
        )
        shown.append(layout.buckets[0])
    return shown[0], shown[1], Deep.calls


def test_buckets_are_laid_out_before_the_first_step_of_a_resumed_run_without_a_step_of_the_users(
    tmp_path: Path,
) -> None:
    for first, resumed, calls in run_ranks(layouts, 2, str(tmp_path)):
        assert first is None
        assert resumed is not None
        assert "," in resumed  # several
        assert calls == 2  # of three steps on each rank, one was done before


# --- what a checkpoint asked for inside a step means -------------------------------------------


class Saves(Callback):
    """Asks for a checkpoint in one hook, once."""

    def __init__(self, hook: str) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        self.asked = False

        def ask(trainer: Any, *_: Any) -> None:
            if not self.asked and not trainer.sanity_checking:
                self.asked = True
                trainer.save_checkpoint("asked")

        setattr(self, hook, ask)

    def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        self.seen.append((trainer.progress.batch_idx, trainer.global_step, trainer.validating))


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("on_train_batch_start", (2, 1)), ("on_after_backward", (2, 1)), ("on_train_batch_end", (2, 1)),
        ("on_train_step_end", (2, 1)), ("on_validation_end", (4, 2)), ("on_train_epoch_end", (6, 3)),
    ],
)  # fmt: skip
def test_a_checkpoint_is_written_when_the_step_it_was_asked_for_in_is_over(hook: str, where: tuple[int, int]) -> None:
    saves = Saves(hook)
    trainer = quiet_trainer(
        max_epochs=1, accumulate_grad_batches=2, val_check_interval=4, callbacks=[saves], precision=64
    )
    trainer.fit(Regression(), loader(12, 2), loader(4, 2))
    assert saves.seen == [(*where, False)]
    assert Path("asked", "manifest.json").exists()


def test_a_checkpoint_asked_for_when_the_run_fails_is_written_at_once() -> None:
    class Fails(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("no")

    class Rescue(Callback):
        def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
            trainer.save_checkpoint("rescue")

    with pytest.raises(ValueError, match="no"):
        quiet_trainer(max_epochs=1, callbacks=[Rescue()]).fit(Fails(), DataLoader([torch.ones(1)] * 4))  # pyright: ignore
    assert Path("rescue", "manifest.json").exists()


# --- what resuming costs -----------------------------------------------------------------------


class Counted(Dataset[Tensor]):
    reads: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        return torch.ones(1)


class CountedOrder(Sampler[int]):
    drawn = 0

    def __len__(self) -> int:
        return 4000

    def __iter__(self) -> Iterator[int]:
        for index in range(4000):
            type(self).drawn += 1
            yield index


class Scheduled(ScalarWeight):
    steps = 0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def factor(step: int) -> float:
            type(self).steps += 1
            return 1.0

        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


class SaveFirst(Callback):
    """Saves after the first step, as if it had been a later one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        if not Path(f"at-{self.steps}").exists():
            progress = trainer.progress
            progress.global_step = progress.batches_seen = progress.batch_idx = self.steps
            trainer.lr_scheduler_configs[0].scheduler.last_epoch = self.steps
            trainer.save_checkpoint(f"at-{self.steps}")
            trainer.stop("saved")


@pytest.mark.parametrize("sampler", [None, CountedOrder])
def test_resuming_at_a_late_step_costs_what_an_early_one_costs(sampler: type[CountedOrder] | None) -> None:
    late = 3000 if sampler else 1_000_000
    costs: list[tuple[int, int, int]] = []
    for steps in (10, late):
        for path in (None, f"at-{steps}"):
            Counted.reads.clear()
            Scheduled.steps = CountedOrder.drawn = 0
            most = -1 if path is None else steps + 2
            trainer = quiet_trainer(max_epochs=1, max_steps=most, callbacks=[SaveFirst(steps)])
            data = DataLoader(Counted(), 1, sampler=sampler() if sampler else None)
            trainer.fit(Scheduled(), data, ckpt_path=path)
        assert len(Counted.reads) == 2
        assert Counted.reads[0] == steps
        costs.append((len(Counted.reads), Scheduled.steps, CountedOrder.drawn))
    assert costs[0] == costs[1]
