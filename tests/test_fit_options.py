"""What the options of the loop do: how long, how often, in which order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from samestep.strategies import SingleDeviceStrategy
from samestep.trainer import DataModule, Task, Trainer
from tasks import Regression, ScalarWeight, loader, parameters_of, quiet_trainer
from torch.utils.data import DataLoader


class Recorded(ScalarWeight):
    """Notes what happens: `t` a training batch, `v` a validation batch, `E` and `e` an epoch's start and end."""

    def __init__(self) -> None:
        super().__init__()
        self.events = ""

    def on_train_epoch_start(self) -> None:
        self.events += "E"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.events += "t"
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.events += "v"
        self.log("val", batch.mean() + self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.events += "e"


def ones(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), **{"batch_size": 1, **options})


def events(train: int = 4, val: int = 1, **options: Any) -> str:
    task = Recorded()
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    quiet_trainer(**options).fit(task, ones(train), ones(val))
    return task.events


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "Ettttve"),
        ({"num_sanity_val_steps": 2}, "vEttttve"),
        ({"num_sanity_val_steps": -1, "val": 3}, "vvvEttttvvve"),
        ({"max_epochs": 2}, "EttttveEttttve"),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, "EtttteEttttveEtttte"),
        ({"val_check_interval": 2}, "Ettvttve"),
        ({"val_check_interval": 0.25}, "Etvtvtvtve"),
        ({"val_check_interval": 3}, "Etttvte"),
        ({"val_check_interval": 3, "max_epochs": 3, "check_val_every_n_epoch": None}, "EtttvteEttvtteEtvtttve"),
        ({"val_check_interval": 1, "accumulate_grad_batches": 2}, "Ettvttve"),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "Ettttve"),
        ({"limit_train_batches": 2}, "Ettve"),
        ({"limit_train_batches": 0.5}, "Ettve"),
        ({"limit_val_batches": 0}, "Etttte"),
        ({"limit_val_batches": 2, "val": 5}, "Ettttvve"),
        ({"limit_val_batches": 0.4, "val": 5}, "Ettttvve"),
        ({"max_steps": 6, "max_epochs": 5}, "EttttveEtte"),
        ({"max_steps": 4, "max_epochs": 5}, "Ettttve"),
        ({"max_steps": 0}, ""),
        ({"max_epochs": 0}, ""),
        ({"max_epochs": None, "max_steps": 5}, "EttttveEte"),
        ({"fast_dev_run": True, "max_epochs": 7, "val": 5}, "Etve"),
        ({"fast_dev_run": 2, "val": 5}, "Ettvve"),
        ({"overfit_batches": 2, "val": 4}, "Ettvve"),
    ],
)
def test_when_what_runs(options: dict[str, Any], expected: str) -> None:
    assert events(**options) == expected


def test_a_stop_is_followed_at_the_next_step_and_not_before_the_minimum() -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                trainer.stop("enough")

    def run(**options: Any) -> tuple[int, str | None]:
        trainer = quiet_trainer(max_epochs=5, callbacks=[Stops()], **options)
        trainer.fit(ScalarWeight(), ones(4))
        return trainer.global_step, trainer.stop_reason

    assert run() == (2, "enough")
    assert run(min_steps=3) == (3, "enough")
    assert run(min_epochs=2) == (8, "enough")


def stop_on_rank_1() -> tuple[int, float, str | None]:
    class Stops(ScalarWeight):
        asked = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.002 * (1 + self.global_rank))
            if self.global_rank == 1 and self.global_step == 20 and not self.asked:
                self.asked = True
                self.trainer.stop("rank 1 has had enough")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=1)
    task = Stops()
    trainer.fit(task, ones(8000))
    return trainer.global_step, task.w.item(), trainer.stop_reason


def test_all_ranks_stop_at_the_same_step_when_one_asks() -> None:
    first, second = run_ranks(stop_on_rank_1, 2)
    assert first == second
    assert 20 < first[0] < 2000
    assert first[2] == "rank 1 has had enough"


def timed() -> int:
    class Slow(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.005)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_time="00:00:00:01")
    trainer.fit(Slow(), ones(40000))
    return trainer.global_step


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_time(ranks: int) -> None:
    steps = run_ranks(timed, ranks)
    assert len(set(steps)) == 1
    assert 10 < steps[0] < 1000


@pytest.mark.parametrize(
    ("scores", "options", "epochs"),
    [
        ([3, 2, 1, 0, 0, 0, 0], {"patience": 2}, 6),
        ([1, 2, 3, 4], {"patience": 1}, 2),
        ([1, 2, 3, 4], {"patience": 3}, 4),
        ([1, 2, 3, 2.5, 2], {"patience": 2, "mode": "max"}, 5),
        ([1, 0.95, 0.9, 0.85], {"patience": 1, "min_delta": 0.1}, 2),
        ([3, float("nan"), 1], {}, 2),
        ([3, float("nan"), 1], {"check_finite": False}, 3),
        ([5, 4, 3, 2], {"stopping_threshold": 3.5}, 3),
        ([5, 4, 30, 2], {"divergence_threshold": 10.0}, 3),
    ],
)
def test_early_stopping(scores: list[float], options: dict[str, Any], epochs: int) -> None:
    class Scored(ScalarWeight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", float(scores[self.current_epoch]))

    callback = EarlyStopping("score", **options)
    trainer = quiet_trainer(max_epochs=len(scores), num_sanity_val_steps=0, callbacks=[callback])
    trainer.fit(Scored(), ones(2), ones(1))
    assert trainer.current_epoch == epochs


def test_a_second_fit_goes_on_counting() -> None:
    trainer = quiet_trainer(max_epochs=2)
    task = ScalarWeight()
    trainer.fit(task, ones(2))
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)
    trainer.fit(task, ones(2))
    assert (trainer.current_epoch, trainer.global_step) == (2, 4), "max_epochs is reached: nothing to do"


def test_a_stop_does_not_survive_into_the_next_fit() -> None:
    class StopsOnce(ScalarWeight):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.should_stop = True

    trainer = quiet_trainer(max_epochs=3)
    task = StopsOnce()
    trainer.fit(task, ones(2))
    assert trainer.current_epoch == 1
    trainer.fit(task, ones(2))
    assert trainer.current_epoch == 3


def test_returning_minus_one_skips_the_rest_of_the_epoch() -> None:
    class Skips(Recorded):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    task = Skips()
    quiet_trainer(max_epochs=2).fit(task, ones(5))
    assert task.events == "EtteEtte"


class MostlyNone(ScalarWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 == self.global_rank else loss


def weight_after_nones(batches: int) -> float:
    task = MostlyNone()
    quiet_trainer(max_epochs=1, use_distributed_sampler=False).fit(task, ones(batches))
    return task.w.item()


def test_none_is_a_gradient_of_zero_and_ranks_stay_paired() -> None:
    # In each of 4 steps one rank has the gradient 1 and the other none: a mean of 1/2.
    assert run_ranks(weight_after_nones, 2, 4) == [-1.0, -1.0]
    assert weight_after_nones(4) == -1.0  # two of four steps


def test_schedulers_step_where_they_say() -> None:
    class Scheduled(Recorded):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([self.w], lr=1.0)
            schedulers = [
                {"scheduler": Counts(optimizer), "interval": interval, "frequency": frequency}
                for interval, frequency in (("step", 1), ("step", 3), ("epoch", 1), ("epoch", 2), ("validation", 1))
            ]
            return [optimizer], schedulers

    class Counts(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer, lambda _: 1.0)

    trainer = quiet_trainer(max_epochs=3, accumulate_grad_batches=2, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(Scheduled(), ones(4), ones(1))
    assert trainer.global_step == 6
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [6, 2, 3, 1, 6]


def plateau_rates() -> list[float]:
    """The metric differs from rank to rank; the learning rate must not."""
    rates: list[float] = []

    class Plateau(ScalarWeight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float([1, 2, 3, 0][self.current_epoch]) * (1 + self.global_rank))

        def on_train_epoch_start(self) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([self.w], lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val"}

    quiet_trainer(max_epochs=4, num_sanity_val_steps=0).fit(Plateau(), ones(4), ones(2))
    return rates


def test_a_plateau_follows_the_reduced_metric_once_a_validation() -> None:
    assert run_ranks(plateau_rates, 2) == [[0.5, 0.5, 0.25, 0.125]] * 2


def test_estimated_stepping_batches_is_known_to_configure_optimizers() -> None:
    class Asks(ScalarWeight):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    for options, steps in (
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": -1}, float("inf")),
    ):
        task = Asks()
        if steps == float("inf"):
            options = {**options, "max_steps": -1, "max_time": "00:00:00:00"}
        quiet_trainer(**options).fit(task, ones(5))
        assert task.steps == steps


def test_the_own_methods_of_a_task_replace_the_trainers() -> None:
    calls: list[str] = []

    class Own(Regression):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            calls.append("backward")
            super().backward(loss)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            calls.append("zero")
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            calls.append(f"clip {gradient_clip_val} {gradient_clip_algorithm}")
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append("step")
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    own, plain = Own(), Regression()
    own.load_state_dict(plain.state_dict())
    for task in (own, plain):
        trainer = quiet_trainer(max_epochs=1, precision=64, gradient_clip_val=0.5, accumulate_grad_batches=2)
        trainer.fit(task, loader(8, 2))
        assert trainer.global_step == 2
    assert calls == ["zero", "backward", "backward", "clip 0.5 norm", "step"] * 2
    assert torch.equal(parameters_of(own), parameters_of(plain))


def test_an_optimizer_step_that_does_not_step_is_not_counted() -> None:
    class Every2(ScalarWeight):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Every2(), ones(6))
    assert trainer.global_step == 3


def test_hooks_run_in_order_and_the_data_module_is_used() -> None:
    calls: list[str] = []

    class Data(DataModule):
        def prepare_data(self) -> None:
            calls.append("data.prepare")

        def setup(self, stage: str) -> None:
            calls.append(f"data.setup {stage}")

        def train_dataloader(self) -> Any:
            return ones(1)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("before transfer")
            return batch * 2

        def teardown(self, stage: str) -> None:
            calls.append(f"data.teardown {stage}")

    class Watch(Callback):
        def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
            calls.append("setup")

        def on_fit_start(self, trainer: Trainer, task: Task) -> None:
            calls.append("fit start")

        def on_before_zero_grad(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
            calls.append("zero grad")

        def on_before_backward(self, trainer: Trainer, task: Task, loss: Any) -> None:
            calls.append(f"backward {loss.item()}")

        def on_after_backward(self, trainer: Trainer, task: Task) -> None:
            calls.append("after backward")

        def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
            calls.append("optimizer")

        def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
            calls.append(f"batch end {outputs['loss'].item()} {trainer.global_step}")

        def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
            calls.append("epoch end")

        def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
            calls.append("teardown")

    quiet_trainer(max_epochs=1, callbacks=[Watch()]).fit(ScalarWeight(), datamodule=Data())
    assert calls == [
        "data.prepare", "data.setup fit", "setup", "fit start", "zero grad", "before transfer", "backward 2.0",
        "after backward", "optimizer", "batch end 2.0 1", "epoch end", "teardown", "data.teardown fit",
    ]  # fmt: skip


def test_an_exception_reaches_the_callbacks_and_cleans_up() -> None:
    calls: list[str] = []

    class Watch(Callback):
        def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
            calls.append(str(exception))

        def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
            calls.append("teardown")

    class Fails(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("broken")

    trainer = quiet_trainer(max_epochs=1, deterministic=True, callbacks=[Watch()])
    with pytest.raises(KeyError, match="broken"):
        trainer.fit(Fails(), ones(1))
    assert calls == ["'broken'", "teardown"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not trainer.training


def test_torch_settings_hold_during_the_run_only() -> None:
    class Looks(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = (
                torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.backends.cudnn.benchmark,
            )  # fmt: skip
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.inference = torch.is_inference_mode_enabled()

    for inference in (True, False):
        task = Looks()
        quiet_trainer(
            max_epochs=1, deterministic=True, detect_anomaly=True, benchmark=True, inference_mode=inference
        ).fit(task, ones(1), ones(1))
        assert task.seen == (True, True, True)
        assert task.inference is inference
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert not torch.backends.cudnn.benchmark


def test_fast_dev_run_leaves_no_trace() -> None:
    import os

    trainer = quiet_trainer(
        fast_dev_run=True,
        logger=True,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(), EarlyStopping("nothing")],
    )
    trainer.fit(ScalarWeight(), ones(3))
    assert trainer.global_step == 1
    assert os.listdir() == []


def test_a_strategy_of_ones_own_plugs_in() -> None:
    class Doubling(SingleDeviceStrategy):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            super().backward(loss * 2)

    task = ScalarWeight()
    quiet_trainer(max_epochs=1, strategy=Doubling()).fit(task, ones(1))
    assert task.w == -1.0


def test_the_panel_says_what_a_step_is(capsys: pytest.CaptureFixture[str]) -> None:
    class Warm(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step"}}

    task = Warm()
    task.net[0].bias.requires_grad_(False)
    trainer = quiet_trainer(max_epochs=2, precision=64, accumulate_grad_batches=2, enable_model_summary=True)
    trainer.fit(task, loader(20, 4))
    text = capsys.readouterr().out
    assert "1 rank × micro-batch 4 × 2 accumulated = 8 samples" in text
    assert "3 steps an epoch, 2 epochs: 6 steps in all" in text
    assert "57 trainable, 8 not" in text
    assert "64-true" in text
    assert "0.01 now, 0.1 at its highest (step 5), 0.1 last" in text
    assert [round(trainer.optimizers[0].param_groups[0]["lr"], 9)] == [0.1]


def panel_of_two_ranks() -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as output:
        quiet_trainer(max_epochs=1, precision=64, enable_model_summary=True).fit(Regression(), loader(21, 4))
    return output.getvalue()


def test_the_panel_of_two_ranks_names_dropped_samples_and_buckets() -> None:
    first, second = run_ranks(panel_of_two_ranks, 2)
    assert second == ""
    assert "2 ranks × micro-batch 4 × 1 accumulated = 8 samples" in first
    assert "1 sample of each epoch left out: it can't be dealt evenly to 2 ranks" in first
    assert "buckets" in first


def optimize_by_hand() -> dict[str, Any]:
    class TwoByHand(Task):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a = torch.nn.Linear(6, 1)
            self.b = torch.nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            for optimizer, net in ((first, self.a), (second, self.b)):
                self.toggle_optimizer(optimizer)
                loss = (net(x).squeeze(1) - y).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.a.parameters(), 0.1), torch.optim.Adam(self.b.parameters(), 0.1)]

    torch.manual_seed(0)
    task = TwoByHand()
    trainer = quiet_trainer(max_epochs=2, precision=64, seed=1)
    trainer.fit(task, loader(24, 24 // (3 * trainer.world_size), shuffle=True))
    return {"parameters": parameters_of(task), "step": trainer.global_step}


def test_manual_optimization_on_two_ranks_equals_one() -> None:
    several = run_ranks(optimize_by_hand, 2)
    one = optimize_by_hand()
    assert torch.equal(several[0]["parameters"], several[1]["parameters"])
    torch.testing.assert_close(several[0]["parameters"], one["parameters"], rtol=0, atol=1e-12)
    assert several[0]["step"] == one["step"] == 6, "one for each batch, however many optimizers"
