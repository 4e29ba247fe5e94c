"""What the ranks must have in common is compared, and what would part them in silence is an error on all of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import EarlyStopping, ModelCheckpoint
from samestep.strategies import DDPStrategy, ProcessGroupStrategy
from samestep.strategies.comm_hooks import FP16, Bucket, Compressed, Int8, OrderedHook, PowerSGD, Wire, resolve
from samestep.trainer import CheckpointError, Task
from samestep.trainer.checkpoint import newest_intact
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler


def this_rank() -> int:
    return int(os.environ.get("RANK", "0"))


# --- options and optimizers --------------------------------------------------------------------


def train_with_own_option(name: str) -> None:
    rank = this_rank()
    trainer: dict[str, Any] = {
        "max_steps": {"max_steps": 3 + rank},
        "max_epochs": {"max_epochs": 1 + rank},
        "accumulate_grad_batches": {"accumulate_grad_batches": 1 + rank},
        "gradient_clip_val": {"gradient_clip_val": 0.1 * (1 + rank)},
    }.get(name, {})
    strategy: dict[str, Any] = {
        "find_unused_parameters": {"find_unused_parameters": rank == 0},
        "static_graph": {"static_graph": rank == 1},
        "comm_hook": {"comm_hook": "fp16" if rank else None},
        "forward_sync_buffers": {"forward_sync_buffers": rank == 0},
    }.get(name, {})
    quiet_trainer(**{"max_epochs": 1, **trainer}, precision=64, strategy=DDPStrategy(**strategy)).fit(
        Regression(), loader(8, 2)
    )


@pytest.mark.parametrize(
    "name",
    [
        "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "find_unused_parameters", "static_graph",
        "comm_hook", "forward_sync_buffers",
    ],
)  # fmt: skip
def test_options_that_differ_are_named_before_anybody_waits(name: str) -> None:
    for error in errors_of_ranks(train_with_own_option, 2, name):
        assert "the options differ from rank to rank: " in error
        assert name in error
        assert "rank 0: " in error


class OwnRate(Regression):
    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.lr > 1 and this_rank() else torch.optim.SGD
        return kind(self.parameters(), lr=0.1 * (1 + this_rank()))


def train_with_own_rate(lr: float) -> None:
    quiet_trainer(max_epochs=1, precision=64).fit(OwnRate(lr=lr), loader(8, 2))


def test_optimizers_that_differ_are_named() -> None:
    for error in errors_of_ranks(train_with_own_rate, 2, 0.1):
        assert "the optimizers differ from rank to rank: lr of optimizer, group 0 (rank 0: 0.1, rank 1: 0.2)" in error
    for error in errors_of_ranks(train_with_own_rate, 2, 2.0):
        assert "optimizer (rank 0: SGD, rank 1: AdamW)" in error


# --- ranks that part --------------------------------------------------------------------------------


def not_averaged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def train_apart(folder: str) -> None:
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=1)] if folder else []
    quiet_trainer(
        max_epochs=1, precision=64, strategy=DDPStrategy(comm_hook=not_averaged), callbacks=callbacks,
        enable_checkpointing=bool(folder), default_root_dir=folder or None,
    ).fit(Regression(), loader(8, 2))  # fmt: skip


def test_ranks_that_have_parted_are_found_at_the_end_and_before_a_checkpoint(tmp_path: Any) -> None:
    for folder in ("", str(tmp_path)):
        for error in errors_of_ranks(train_apart, 2, folder):
            assert "the ranks hold different weights" in error
            assert "a communication hook or strategy of your own that does not average" in error
    assert not list(tmp_path.glob("step-*"))


def train_with_bare_groups() -> None:
    quiet_trainer(max_epochs=1, precision=64, strategy=ProcessGroupStrategy()).fit(Regression(), loader(8, 2))


def test_a_strategy_that_reduces_no_gradients_is_refused() -> None:
    for error in errors_of_ranks(train_with_bare_groups, 2):
        assert "reduces no gradients, so each rank would train on its own" in error


class StepsAlone(ProcessGroupStrategy):
    """Overrides the step, and forgets to average."""

    def optimizer_step(self, optimizer: Any) -> bool:
        return super().optimizer_step(optimizer)


class OwnBatches(Regression):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + this_rank())


def train_steps_alone() -> None:
    quiet_trainer(max_epochs=1, precision=64, strategy=StepsAlone(), seed=1).fit(OwnBatches(), loader(8, 2))


def test_a_strategy_of_ones_own_whose_ranks_part_is_found() -> None:
    for error in errors_of_ranks(train_steps_alone, 2):
        assert "the ranks hold different weights" in error


# --- hooks of one's own --------------------------------------------------------------------------------


class InPlace(Wire):
    def mean(self, tensor: Tensor, group: dist.ProcessGroup) -> Any:
        dist.all_reduce(tensor, group=group)


class ReturnsNothing(OrderedHook):
    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Any:
        dist.all_reduce(bucket.flat, group=group)


def raw_future(state: Any, bucket: dist.GradBucket) -> Any:
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()  # pyright: ignore


def future_of_none(state: Any, bucket: dist.GradBucket) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(None)
    return future


def truncated(state: Any, bucket: dist.GradBucket) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer().long())
    return future


def train_with_hook(name: str) -> Tensor:
    hook: Any = {
        "wire": lambda: Compressed(InPlace()), "ordered": ReturnsNothing, "none": lambda: future_of_none,
        "integers": lambda: truncated, "raw": lambda: raw_future, "no": lambda: None,
    }[name]()  # fmt: skip
    torch.manual_seed(0)
    task = Regression()
    quiet_trainer(max_epochs=1, precision=64, strategy=DDPStrategy(comm_hook=hook)).fit(task, loader(8, 2))
    return parameters_of(task)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wire", "mean returned NoneType: expected the tensor"),
        ("ordered", "mean returned NoneType: expected the tensor"),
        ("none", "gave a future of NoneType: expected a tensor of torch.float64"),
        ("integers", "gave a future of torch.int64: expected a tensor of torch.float64"),
    ],
)
def test_a_hook_that_gives_no_mean_is_an_error_and_no_hang(name: str, message: str) -> None:
    for error in errors_of_ranks(train_with_hook, 2, name):
        assert message in error


def test_the_future_of_an_all_reduce_is_taken_as_it_is() -> None:
    assert torch.equal(run_ranks(train_with_hook, 2, "raw")[0], run_ranks(train_with_hook, 2, "no")[0])


def test_hooks_and_wires_are_checked_when_they_are_made() -> None:
    for wire in (Int8, "int8"):
        with pytest.raises(TypeError, match="expected an object such as FP16"):
            Compressed(wire)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="can't be called with"):
        resolve(lambda bucket: bucket)
    with pytest.raises(ValueError, match="rank='a'"):
        PowerSGD(rank="a", wire=FP16())  # pyright: ignore[reportArgumentType]


# --- nothing trained -----------------------------------------------------------------------------------


class Overflows(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss([part.float() for part in batch]) * torch.inf


class NeverSteps(ScalarWeight):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward((self.w * batch).mean())


def test_a_run_that_trained_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(max_epochs=1, precision="16-mixed").fit(Overflows(), loader(8, 2))
    assert (
        "nothing was trained: at precision='16-mixed' every step had gradients of inf or NaN" in capsys.readouterr().out
    )
    quiet_trainer(max_epochs=1).fit(NeverSteps(), DataLoader(torch.ones(4), 1))
    assert "nothing was trained: training_step called no optimizer.step()" in capsys.readouterr().out


# --- resuming with something else ------------------------------------------------------------------------


def fit_with(folder: Any, task: Task, data: Any, ckpt: Any = None, **options: Any) -> Any:
    keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        callbacks=[keep], enable_checkpointing=True, default_root_dir=str(folder), seed=1, **options
    )
    trainer.fit(task, data, ckpt_path=ckpt)
    return trainer


class WithOptimizer(Regression):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)  # pyright: ignore[reportCallIssue]


def test_another_optimizer_is_refused(tmp_path: Any) -> None:
    fit_with(tmp_path, WithOptimizer(torch.optim.AdamW), loader(8, 2), max_epochs=1, precision=64)
    with pytest.raises(CheckpointError, match="holds the state of AdamW, configure_optimizers returned Adam"):
        fit_with(
            tmp_path,
            WithOptimizer(torch.optim.Adam),
            loader(8, 2),
            tmp_path / "step-00000004",
            max_epochs=2,
            precision=64,
        )


def test_another_order_inside_an_epoch_is_refused(tmp_path: Any) -> None:
    fit_with(tmp_path, Regression(), loader(16, 2), max_epochs=1, precision=64)
    inside = tmp_path / "step-00000002"
    with pytest.raises(CheckpointError, match=r"in the order of the dataset; here .* of a shuffle"):
        fit_with(tmp_path, Regression(), loader(16, 2, shuffle=True), inside, max_epochs=2, precision=64)
    dataset = loader(16, 2).dataset
    sampled = DataLoader(dataset, 2, sampler=RandomSampler(dataset, replacement=True))  # pyright: ignore
    with pytest.raises(CheckpointError, match="of RandomSampler"):
        fit_with(tmp_path, Regression(), sampled, inside, max_epochs=2, precision=64)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_numbers_of_an_optimizers_state_keep_their_type(tmp_path: Any, precision: str) -> None:
    def run(epochs: int, ckpt: Any) -> Tensor:
        torch.manual_seed(0)
        task = WithOptimizer(torch.optim.NAdam)
        fit_with(
            tmp_path / f"{epochs}{ckpt is None}", task, loader(16, 2), ckpt, max_epochs=epochs, precision=precision
        )
        return parameters_of(task)

    whole = run(3, None)
    run(1, None)
    assert torch.equal(run(3, tmp_path / "1True" / "step-00000008"), whole)


def test_the_best_of_the_run_before_is_found_by_its_link(tmp_path: Any) -> None:
    keep = ModelCheckpoint(tmp_path / "checkpoints", monitor="val/loss")
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": str(tmp_path), "precision": 64}
    quiet_trainer(max_epochs=2, callbacks=[keep], **options).fit(Regression(), loader(8, 2), loader(8, 2))
    again = quiet_trainer(callbacks=[ModelCheckpoint(monitor="val/loss")], **options)
    assert again.validate(Regression(), loader(8, 2), ckpt_path="best")[0]["val/loss"] == pytest.approx(
        float(keep.best_model_score or 0)
    )


def test_an_infinite_value_never_displaces_a_finite_one(tmp_path: Any) -> None:
    class Diverges(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", 5.0 if self.current_epoch == 0 else float("inf"))

    for mode in ("min", "max"):
        keep = ModelCheckpoint(tmp_path / mode, monitor="v", mode=mode)
        trainer = quiet_trainer(max_epochs=3, precision=64, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(Diverges(), loader(8, 2), loader(8, 2))
        assert keep.best_model_path.endswith("step-00000004")
        assert os.path.isdir(keep.best_model_path)


class Stands(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0)


@pytest.mark.parametrize("patience", [1, 4])
def test_a_run_that_was_stopped_stays_stopped_unless_there_is_more_patience(tmp_path: Any, patience: int) -> None:
    def run(patience: int) -> int:
        callbacks = [ModelCheckpoint(), EarlyStopping("v", patience=patience)]
        trainer = quiet_trainer(
            max_epochs=9, precision=64, callbacks=callbacks, enable_checkpointing=True, default_root_dir=str(tmp_path)
        )
        trainer.fit(Stands(), loader(8, 2), loader(8, 2), ckpt_path="auto")
        return trainer.progress.epochs_done

    assert run(1) == 2
    assert run(patience) == {1: 2, 4: 5}[patience]
    assert run(patience) == {1: 2, 4: 5}[patience]


def test_a_damaged_manifest_is_named_when_it_is_passed_over(tmp_path: Any) -> None:
    fit_with(tmp_path, Regression(), loader(8, 2), max_epochs=2, precision=64)
    newest = max(tmp_path.glob("step-*"))
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"step"', '"stop"'), "utf-8")
    (newest / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=f"samestep: passed over: .*{newest.name}"):
        assert newest_intact([tmp_path]) == sorted(tmp_path.glob("step-*"))[-2]


def test_an_evaluation_that_ends_short_is_an_error() -> None:
    class Breaks(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return numbers_at(index) if index != 5 else next(iter([]))

    def numbers_at(index: int) -> Any:
        return loader(8, 1).dataset[index]

    with pytest.raises(RuntimeError, match="the validation loader gave 5 batches, but its length is 8"):
        quiet_trainer(precision=64).validate(Regression(), DataLoader(Breaks(), 1))
