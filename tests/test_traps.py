"""The traps of torch's DDP that a user of plain torch falls into, by their number in the list of traps.

Those that are not here are tested with what they belong to: 1, 30–32 and 35 in test_faults.py, test_bad_input.py and
test_evaluation.py; 9–15 in test_uneven_inputs.py; 16 and 20 in test_comm_hooks.py; 17 and 18 in test_optimizers_of_ddp.py;
19 and 22 in test_precision.py; 24 in test_signals.py; 26 in test_exact_resume.py; 33 and 34 in test_compile.py; 36 in
test_stateful_loaders.py; 37 and 38 in test_checkpoint_folders.py and test_faults.py; 40 in test_chaos.py. 27 and 28 are of
torch's distributed checkpoints, which are not used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import RankError, errors_of_ranks, run_ranks
from samestep.callbacks import Callback
from samestep.strategies import DDPStrategy, checkpoint_activations
from samestep.trainer import Task
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def this_rank() -> int:
    return int(os.environ["RANK"])


class PerRank(Task):
    """Linear(1, 1) with weight 1; rank r gets x = 1 + 2r. The averaged gradient of a step is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * batch.mean() * (1 + 2 * this_rank())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


def weight_after(kind: type[PerRank], options: dict[str, Any], accumulation: int = 1, batches: int = 4) -> float:
    task = kind()
    trainer = quiet_trainer(max_epochs=1, strategy=DDPStrategy(**options), accumulate_grad_batches=accumulation)
    trainer.fit(task, DataLoader(torch.ones(2 * batches), 1))
    return task.w.item()


# 1: a training step that goes round DDP.forward is not reduced


def test_1_the_step_goes_through_ddp() -> None:
    assert run_ranks(weight_after, 2, PerRank, {}) == [1 - 4 * 2.0] * 2


# 2: a rank that leaves out a backward shifts the pairing of all that follow


class LeavesOut(PerRank):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 and this_rank() == 1:
            return None
        return super().training_step(batch * (1 + batch_idx), batch_idx)


def test_2_a_rank_that_returns_none_still_takes_part() -> None:
    expected = 1 - (1 + 0) / 2 - 2.0 * (2 + 3 + 4)
    assert run_ranks(weight_after, 2, LeavesOut, {}) == [expected] * 2
    with_window = 1 - (1 / 2 + 4.0) / 2 - (2.0 * 3 + 2.0 * 4) / 2
    assert run_ranks(weight_after, 2, LeavesOut, {}, 2) == pytest.approx([with_window] * 2)


# 3: an exception of one rank that is caught pairs other steps with each other


class FailsOnce(PerRank):
    def on_after_backward(self) -> None:
        if this_rank() == 1 and self.trainer.global_step == 2:
            raise ValueError("a hook of rank 1 failed")


def test_3_an_exception_in_one_rank_ends_all_of_them() -> None:
    with pytest.raises(RankError, match="a hook of rank 1 failed") as caught:
        run_ranks(weight_after, 2, FailsOnce, {}, timeout=40)
    assert "rank 0" in str(caught.value)


# 4: a metric of one rank is added to a gradient of the other


class Uneven:
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(1)] * (2 + this_rank()))


class Logs(PerRank):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("hundred", 100.0, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def log_uneven() -> tuple[float, float]:
    task = Logs()
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1)
    trainer.fit(task, Uneven())
    return task.w.item(), trainer.callback_metrics["hundred"].item()


def test_4_metrics_and_gradients_are_never_mixed() -> None:
    assert run_ranks(log_uneven, 2) == [(1 - 2 * 2.0, 100.0)] * 2


# 5: static_graph with no_sync in the first micro-batch is an internal error


@pytest.mark.parametrize("accumulation", [2, 3])
def test_5_a_static_graph_may_accumulate(accumulation: int) -> None:
    plain = run_ranks(weight_after, 2, PerRank, {}, accumulation, 5)
    assert run_ranks(weight_after, 2, PerRank, {"static_graph": True}, accumulation, 5) == plain


# 6: with its forward outside of no_sync, each micro-batch is reduced


class CountsBuckets:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def buckets_reduced(accumulation: int) -> tuple[int, int]:
    hook = CountsBuckets()
    trainer = quiet_trainer(
        max_epochs=1, precision=64, accumulate_grad_batches=accumulation, strategy=DDPStrategy(comm_hook=hook)
    )
    trainer.fit(Regression(), loader(32, 2))
    return hook.calls, trainer.global_step


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_6_each_bucket_is_reduced_once_a_step(accumulation: int) -> None:
    for calls, steps in run_ranks(buckets_reduced, 2, accumulation):
        assert calls == steps == -(-8 // accumulation)


# 7: of two forwards and two backwards, DDP reduces one


class Twice(PerRank):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = super().training_step(batch, batch_idx), super().training_step(2 * batch, batch_idx)
        self.manual_backward(first)
        self.manual_backward(second)
        optimizer.step()


def test_7_several_backwards_of_a_step_are_all_reduced() -> None:
    assert run_ranks(weight_after, 2, Twice, {}) == [1 - 4 * (2.0 + 4.0)] * 2


# 8: a layer checkpointed twice by the reentrant kind has other gradients on each rank


class Reentrant(Task):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = (batch * (1 + this_rank())).requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_checkpointed(reentrant: bool, static_graph: bool) -> Tensor:
    torch.manual_seed(0)
    task = Reentrant(reentrant)
    quiet_trainer(max_epochs=1, strategy=DDPStrategy(static_graph=static_graph)).fit(
        task, DataLoader(torch.ones(8, 4), 2)
    )
    return parameters_of(task)


def test_8_reentrant_checkpoints_need_a_static_graph() -> None:
    for error in errors_of_ranks(train_checkpointed, 2, True, False):
        assert "use_reentrant=False" in error
    right, other = run_ranks(train_checkpointed, 2, False, False)
    assert torch.equal(right, other)
    for parameters in run_ranks(train_checkpointed, 2, True, True):
        torch.testing.assert_close(parameters, right)


class Recomputed(Regression):
    def configure_model(self) -> None:
        if not self.__dict__.get("done"):
            self.done = True
            checkpoint_activations(self.net, nn.Tanh)


def train_recomputed(kind: type[Task]) -> Tensor:
    torch.manual_seed(0)
    task = kind()
    quiet_trainer(max_epochs=1, precision=64, strategy=DDPStrategy()).fit(task, loader(16, 2))
    return parameters_of(task)


def test_8_recomputed_activations_give_the_same_gradients() -> None:
    first, second = run_ranks(train_recomputed, 2, Recomputed)
    assert torch.equal(first, second)
    assert torch.equal(first, run_ranks(train_recomputed, 2, Regression)[0])


# 21: ReduceLROnPlateau by a metric that each rank measures for itself


class Plateau(ScalarWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        # Rank 0's gets better with each epoch, rank 1's as much worse: the mean stands still.
        self.log("value", 10.0 + (1 if this_rank() else -1) * self.current_epoch, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "value"}}


def rate_after_a_plateau() -> float:
    trainer = quiet_trainer(max_epochs=4)
    trainer.fit(Plateau(), DataLoader(torch.ones(8), 1))
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_21_a_plateau_is_seen_by_all_ranks_alike() -> None:
    assert run_ranks(rate_after_a_plateau, 2) == pytest.approx([0.1 * 0.5**3] * 2)


# 23: on gloo, a restarted group reads the addresses of dead processes

RESTARTED = """
import os, signal
import torch
from samestep.trainer import Task, Trainer
from torch.utils.data import DataLoader

class Scalar(Task):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))
    def training_step(self, batch, batch_idx):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.w * batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=1.0)

trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, accelerator="cpu")
task = Scalar()
trainer.fit(task, DataLoader(torch.ones(8), 1))
trainer.print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], "weight", task.w.item())
"""


def test_23_a_restarted_group_meets_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    result = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert "restart 1 weight -3.0" in result.stdout, result.stderr


# 25: two threads on one group give wrong sums


def count_groups() -> int:
    strategy = DDPStrategy(comm_hook="fp16")
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            hook: Any = strategy.comm_hook
            seen.extend([strategy.groups.training, strategy.groups.control, hook.context.group])

    quiet_trainer(max_epochs=1, precision=64, strategy=strategy, callbacks=[Looks()]).fit(Regression(), loader(8, 2))
    return len({id(group) for group in seen})


def test_25_what_communicates_in_a_thread_of_its_own_has_a_group_of_its_own() -> None:
    assert run_ranks(count_groups, 2) == [3, 3]


# 29: an evaluation through DDP by one rank waits for the others


class AloneWithBuffers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def on_train_batch_end(self, *arguments: Any) -> None:
        if this_rank() == 0:
            self.eval()
            with torch.no_grad():
                self.net(torch.ones(1, 6, dtype=torch.float64))
            self.train()


def evaluate_alone() -> Tensor:
    torch.manual_seed(0)
    task = AloneWithBuffers()
    quiet_trainer(max_epochs=1, precision=64).fit(task, loader(16, 2))
    return parameters_of(task)


def test_29_one_rank_may_evaluate_by_itself() -> None:
    first, second = run_ranks(evaluate_alone, 2)
    assert torch.equal(first, second)


# 39: two outputs with a backward each, where unused parameters are found


class TwoLosses(Task):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for head in self.heads:
            self.manual_backward(head(self.trunk(batch * (1 + this_rank()))).pow(2).mean())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_two_losses() -> Tensor:
    torch.manual_seed(0)
    task = TwoLosses()
    quiet_trainer(max_epochs=1).fit(task, DataLoader(torch.ones(8, 2), 2))
    return parameters_of(task)


def test_39_two_losses_may_have_a_backward_each() -> None:
    first, second = run_ranks(train_two_losses, 2)
    assert torch.equal(first, second)
