"""Steps that are not taken, and the way back: decided alike on all ranks, bounded, and exactly what is promised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback, LossSpikeRollback
from samestep.strategies import DDPStrategy
from samestep.trainer import DivergedError
from tasks import Regression, numbers, parameters_of, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES, SIZE = 24, 4


def data_with(poison: float, *batches: int, without: tuple[int, ...] = ()) -> TensorDataset:
    """Samples of which those of some batches have their target at `poison`; those of `without` are left out."""
    x, y = numbers(BATCHES * SIZE).tensors
    y = y.clone()
    for batch in batches:
        y[batch * SIZE] = poison
    kept = [i for i in range(len(y)) if i // SIZE not in without]
    return TensorDataset(x[kept], y[kept])


class Noisy(Regression):
    """With dropout, momentum, and a schedule: all of it must come back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Average(Callback):
    """An average of the parameters, as a callback may keep it."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict["value"]

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        self.value = 0.9 * self.value + 0.1 * parameters_of(task).sum()


class SavesAfter(Callback):
    """Saves after a micro-batch, under its number; with None never."""

    monitors = True  # behind those that go back

    def __init__(self, batches: int | None, folder: Path) -> None:
        self.batches, self.folder = batches, folder

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        if trainer.progress.batch_idx == self.batches:
            trainer.save_checkpoint(self.folder / str(self.batches))


class PlainSteps(Noisy):
    """Without random numbers: those of a skipped step's forward are drawn all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Identity()


Outcome = tuple[Tensor, dict[str, Any], float, int]


def outcome(trainer: Any, task: Any) -> Outcome:
    """Parameters, optimizer state, learning rate, steps."""
    states = trainer.optimizers[0].state_dict()["state"]
    moments = {
        name: torch.cat([states[i][name].reshape(-1) for i in states]) for name in ("exp_avg", "exp_avg_sq", "step")
    }
    return parameters_of(task), moments, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0], trainer.global_step


def same(first: Outcome, second: Outcome) -> bool:
    moments = all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    return torch.equal(first[0], second[0]) and moments and first[2:] == second[2:]


# --- steps that are not finite ---------------------------------------------------------------


def train(data: TensorDataset, ranks: int = 1, **options: Any) -> tuple[Outcome, float]:
    """The outcome, and the logged number of skipped steps."""
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(max_epochs=1, precision=64, seed=3, log_every_n_steps=1, **options)
    task = PlainSteps()  # with the weights that the trainer's seed gives
    trainer.fit(task, DataLoader(data, SIZE // ranks), ckpt_path=ckpt_path)
    return outcome(trainer, task), trainer.logged_metrics["skipped_steps"].item() if options else 0.0


CLIPPING: list[dict[str, Any]] = [
    {}, {"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
]  # fmt: skip


def skips_on_ranks() -> list[tuple[Outcome, float]]:
    return [
        train(data_with(value, 5, 6, 11), ranks=2, skip_nonfinite=2, **clipping)
        for value in (math.nan, math.inf)
        for clipping in CLIPPING
    ]


def test_a_step_that_is_not_finite_on_one_rank_is_taken_on_none_and_moves_nothing() -> None:
    """The poisoned sample lies on rank 0 alone. Bitwise: as a run that is never given those batches."""
    first, second = run_ranks(skips_on_ranks, 2, timeout=100)
    expected = run_ranks(never_given, 2, timeout=100)[0] * 2
    for mine, theirs, wanted in zip(first, second, expected, strict=True):
        assert same(mine[0], theirs[0])
        assert same(mine[0], wanted)
        assert mine[1] == 3
        assert mine[0][3] == BATCHES - 3


def never_given() -> list[Outcome]:
    return [
        train(data_with(0.0, without=(5, 6, 11)), ranks=2, skip_nonfinite=9, **clipping)[0] for clipping in CLIPPING
    ]


def test_too_many_in_a_row_end_the_run_as_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    data = data_with(math.inf, 5, 6, 7, 11)
    with pytest.raises(DivergedError, match=r"inf or NaN in 3 steps in a row, after step 5: expected skip_nonfinite=2"):
        train(data, skip_nonfinite=2)
    assert (
        "the step after step 5 is skipped: its gradients are inf or NaN (1 step so far, 1 in a row)"
        in capsys.readouterr().err
    )
    assert train(data, skip_nonfinite=3)[1] == 4


def test_a_resumed_run_goes_on_counting_what_it_skips(tmp_path: Path) -> None:
    def run(limit: int, at: int | None, ckpt_path: Path | None = None) -> tuple[Outcome, float]:
        return train(
            data_with(math.inf, 2, 5, 6, 7, 11),
            skip_nonfinite=limit,
            callbacks=[SavesAfter(at, tmp_path)],
            ckpt_path=ckpt_path,
        )

    whole = run(3, 7)
    assert whole[1] == 5
    resumed = run(3, None, tmp_path / "7")
    assert same(resumed[0], whole[0])
    assert resumed[1] == 5, "two before the checkpoint, and three behind it"
    with pytest.raises(DivergedError, match="in 3 steps in a row, after step 4"):
        run(2, None, tmp_path / "7")


def diverge_on_ranks() -> None:
    train(data_with(math.inf, 5, 6, 7), ranks=2, skip_nonfinite=2)


def test_all_ranks_diverge_at_the_same_step() -> None:
    first, second = errors_of_ranks(diverge_on_ranks, 2)
    assert first == second
    assert first.startswith("DivergedError: the gradients were inf or NaN in 3 steps in a row, after step 5")


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_skipping_is_refused_where_it_can_not_be_kept() -> None:
    with pytest.raises(ValueError, match="skip_nonfinite=0: expected a whole number of 1 or more"):
        quiet_trainer(skip_nonfinite=0)
    with pytest.raises(ValueError, match="its scaler skips such steps already"):
        quiet_trainer(skip_nonfinite=3, precision="16-mixed")
    for strategy in (DDPStrategy(optimizer_in_backward=True), DDPStrategy(comm_hook="post_local_sgd")):
        with pytest.raises(ValueError, match="skip_nonfinite"):
            quiet_trainer(skip_nonfinite=3, strategy=strategy)
    with pytest.raises(ValueError, match="skip_nonfinite with automatic_optimization=False"):
        quiet_trainer(skip_nonfinite=3, max_epochs=1, precision=64).fit(Manual(), DataLoader(numbers(8), 4))


# --- loss spikes -----------------------------------------------------------------------------


def roll_back(ranks: int, *poisoned: int, without: tuple[int, ...] = (), **options: Any) -> tuple[Outcome, float, int]:
    """Outcome, the average, and rollbacks."""
    average = Average()
    callback = LossSpikeRollback("loss", threshold=30, **{"every_n_train_steps": 4, "max_rollbacks": 2, **options})
    trainer = quiet_trainer(
        max_epochs=1, precision=64, seed=3, log_every_n_steps=1, gradient_clip_val=1.0, callbacks=[callback, average],
    )  # fmt: skip
    task = Noisy()
    trainer.fit(task, DataLoader(data_with(1e6, *poisoned, without=without), SIZE // ranks))
    return outcome(trainer, task), average.value.item(), callback.rollbacks


def compare_rollbacks(ranks: int) -> list[bool]:
    """Whether a run that goes back is the run that never saw the batches from the good state to the jump."""
    # Good states are copied after batches 3, 7, 11, …; a jump in batch 9 goes back to the one after 7.
    once, never = roll_back(ranks, 9), roll_back(ranks, without=(8, 9))
    twice, neither = roll_back(ranks, 9, 12), roll_back(ranks, without=(8, 9, 10, 11, 12))
    return [
        same(once[0], never[0]), once[1] == never[1], once[2] == 1, never[2] == 0, once[0][3] == BATCHES - 2,
        same(twice[0], neither[0]), twice[1] == neither[1], twice[2] == 2, not same(once[0], roll_back(ranks)[0]),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_back_is_the_run_that_was_never_given_those_batches(ranks: int) -> None:
    results = [compare_rollbacks(1)] if ranks == 1 else run_ranks(compare_rollbacks, 2, 2, timeout=100)
    for result in results:
        assert result == [True] * 9


def resume_rollbacks(ranks: int, folder: str, saves: bool, stops: tuple[int, ...]) -> list[Any]:
    """Runs that save after a micro-batch each, or those that go on from what they saved; with the good states they end with."""
    results: list[Any] = []
    for stop in stops:
        average, back = Average(), LossSpikeRollback("loss", threshold=30, every_n_train_steps=4)
        trainer = quiet_trainer(
            max_epochs=1, precision=64, seed=3, log_every_n_steps=1, strategy=DDPStrategy(comm_hook="powersgd"),
            callbacks=[back, average, SavesAfter(stop if saves else None, Path(folder))],
        )  # fmt: skip
        task = Noisy()
        data = DataLoader(data_with(1e6, 9, 16), SIZE // ranks)
        trainer.fit(task, data, ckpt_path=None if saves else Path(folder) / str(stop))
        states = [
            *back.state_dict()["values"],
            back.rollbacks,
            back.state_dict()["good"]["step"],
            torch.rand(()).item(),
        ]
        results.append((outcome(trainer, task), average.value.item(), states))
    return results


# Good states are taken at the start and behind 4, 8, …; the jumps come with the tenth and the seventeenth.
STOPS = (2, 7, 8, 9, 10, 13, 16, 17, 20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_back_as_the_one_that_was_never_stopped(ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(resume_rollbacks, ranks, ranks, folder, True, STOPS, timeout=100)
    resumed = run_ranks(resume_rollbacks, ranks, ranks, folder, False, STOPS, timeout=100)
    for before, after in zip(whole, resumed, strict=True):
        for first, second in zip(before, after, strict=True):
            assert first[2][-3] == 2, "rollbacks"
            assert same(first[0], second[0])
            assert first[1:] == second[1:]
    (other,) = run_ranks(resume_rollbacks, 1, 1, folder, False, (20,), timeout=100)
    assert other[0][0][3] == whole[0][0][0][3], "on another number of ranks it goes on with a good state of its own"


class BreaksItself(Noisy):
    """In one step the loss is finite, and its gradient is not."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.step:
            loss = loss + (self.net[0].weight.sum() * 0).sqrt()
        return loss


@pytest.mark.parametrize("step", [6, 7, 8])
def test_a_state_is_good_when_a_loss_made_with_it_is(step: int) -> None:
    """Copies are made behind steps 4, 8, …: batch 7 makes the eighth step."""
    back = LossSpikeRollback("loss", threshold=30, every_n_train_steps=4)
    trainer = quiet_trainer(max_epochs=1, precision=64, seed=3, log_every_n_steps=1, callbacks=[back])
    task = BreaksItself(step)
    trainer.fit(task, DataLoader(data_with(0.0), SIZE))
    assert back.rollbacks == 1
    assert parameters_of(task).isfinite().all()
    assert trainer.global_step == BATCHES - (step + 2 - (8 if step == 8 else 4))


def test_a_name_that_no_step_logs_is_refused() -> None:
    trainer = quiet_trainer(max_epochs=1, precision=64, log_every_n_steps=1, callbacks=[LossSpikeRollback("los")])
    with pytest.raises(
        RuntimeError, match="LossSpikeRollback monitors 'los', which was not logged: expected one of 'loss'"
    ):
        trainer.fit(Noisy(), DataLoader(data_with(0.0), SIZE), DataLoader(data_with(0.0), SIZE))


def test_the_way_back_is_told_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        DivergedError, match=r"loss jumped to .* at step 9, of late .*, after 1 rollback: expected no more"
    ):
        roll_back(1, 9, 10, max_rollbacks=1)
    told = capsys.readouterr().out
    assert "LossSpikeRollback: loss jumped to 2.5e+11 at step 10, of late" in told
    assert "Back to step 8; the samples of 2 steps are left out (rollback 1 of 1)" in told


def test_a_lower_loss_an_equal_one_and_one_jump_with_more_patience_are_no_spike() -> None:
    callback = LossSpikeRollback("loss", threshold=5, window=20)
    callback.load_state_dict({"values": [1.0] * 10, "rollbacks": 0})
    assert [callback.is_spike(value) for value in (1.0, 0.1, 1.004, 1.02, math.inf, math.nan)] == [False] * 3 + [
        True
    ] * 3
    assert roll_back(1, 9, patience=2)[2] == 0


@pytest.mark.parametrize("wrong", [{"threshold": 0.5}, {"window": 4}, {"patience": 0}, {"max_rollbacks": -1}])
def test_impossible_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"LossSpikeRollback\({next(iter(wrong))}=.*\): expected .* or more"):
        LossSpikeRollback("loss", **wrong)
