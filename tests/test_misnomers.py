"""Methods that nobody would call are refused with the right name; a user's own helpers pass, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samestep.callbacks import Callback
from samestep.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from samestep.trainer import DataModule, Task
from samestep.trainer.hooks import check_hooks
from samestep.trainer.misnomers import FORMER
from samestep.trainer.strategy_check import check_strategy
from tasks import ScalarWeight, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader


def with_methods(base: type, *headers: str) -> Any:
    """An object of a subclass of `base` with methods that do nothing, such as `step(self, batch)`."""
    methods: dict[str, Any] = {}
    for header in headers:
        exec(f"def {header}: ...", methods)
    del methods["__builtins__"]
    return type("Mine", (base,), methods)()


# --- former names ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_of_lightnings_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called\. Instead: ") as error:
        check_hooks(with_methods(Task, f"{name}(self, outputs=None)"), Task)
    assert FORMER[name] in str(error.value)


def test_former_hooks_of_callbacks_are_refused_too() -> None:
    with pytest.raises(TypeError, match=r"Mine\.on_epoch_end would never be called\. Instead: on_train_epoch_end"):
        quiet_trainer(callbacks=[with_methods(Callback, "on_epoch_end(self, trainer, task)")])


# --- near misses -----------------------------------------------------------------------------

NEAR: list[tuple[type, str, str]] = [
    (Task, "train_step(self, batch, batch_idx)", "training_step"),
    (Task, "training_steps(self, batch, batch_idx)", "training_step"),
    (Task, "trainig_step(self, batch)", "training_step"),
    (Task, "val_step(self, batch, batch_index)", "validation_step"),
    (Task, "validation_steps(self, batch, batch_idx)", "validation_step"),
    (Task, "validaton_step(self, x, idx)", "validation_step"),
    (Task, "tests_step(self, batch, batch_idx)", "test_step"),
    (Task, "prediction_step(self, batch, batch_idx, dataloader_idx=0)", "predict_step"),
    (Task, "configure_optimizer(self)", "configure_optimizers"),
    (Task, "configure_optimisers(self)", "configure_optimizers"),
    (Task, "configure_callback(self)", "configure_callbacks"),
    (Task, "val_dataloaders(self)", "val_dataloader"),
    (Task, "validation_dataloader(self)", "val_dataloader"),
    (Task, "optimiser_step(self, epoch, batch_idx, optimizer, closure)", "optimizer_step"),
    (Task, "optimizer_zero_grads(self, epoch, batch_idx, optimizer)", "optimizer_zero_grad"),
    (Task, "transfer_batches_to_device(self, batch, device, dataloader_idx)", "transfer_batch_to_device"),
    (Task, "train_epoch_end(self)", "on_train_epoch_end"),
    (Task, "validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx)", "on_validation_batch_end"),
    (DataModule, "train_dataloaders(self)", "train_dataloader"),
    (DataModule, "val_dataloaders(self)", "val_dataloader"),
    (DataModule, "test_data_loader(self)", "test_dataloader"),
    (DataModule, "predict_dataloaders(self)", "predict_dataloader"),
    (Callback, "train_epoch_start(self, trainer, task)", "on_train_epoch_start"),
]


@pytest.mark.parametrize(("base", "header", "right"), NEAR)
def test_a_near_miss_is_refused_with_the_name_that_was_meant(base: type, header: str, right: str) -> None:
    name = header.partition("(")[0]
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called: did you mean '{right}'"):
        check_hooks(with_methods(base, header), base)


@pytest.mark.parametrize(("base", "header", "right"), NEAR)
def test_the_same_method_is_a_helper_where_the_right_one_is_there(base: type, header: str, right: str) -> None:
    check_hooks(with_methods(base, header, f"{right}(self, *args)"), base)


HELPERS = [
    "step(self, batch)", "loss(self, batch)", "training_loss(self, batch, batch_idx)", "train_one(self, batch)",
    "validate_inputs(self, batch)", "forward_step(self, batch, batch_idx)", "shared_step(self, batch, batch_idx)",
    "eval_step(self, batch)", "next_step(self, batch, batch_idx)", "best_step(self)", "training_steps(self)",
    "test_steps(self, count)", "predict_steps(self, batch, count)", "train_step(self, x, y)", "_train_step(self, batch)",
    "training_set(self)", "test_set(self)", "train_loader(self)", "val_loader(self)", "make_train_dataloader(self)",
    "val_dataloaders(self, count)", "prepared_data(self)", "configure_models(self)", "configure_optimizer(self, net)",
    "configure_network(self)", "optimize_step(self, loss)", "epoch_end(self)", "train_epoch_end(self, values)",
    "save_checkpoint(self, path)", "train_start(self)", "backwards(self, loss)", "set_up(self, stage)",
]  # fmt: skip


@pytest.mark.parametrize("base", [Task, DataModule, Callback])
@pytest.mark.parametrize("header", HELPERS)
def test_helpers_of_the_users_own_pass(base: type, header: str) -> None:
    check_hooks(with_methods(base, header), base)


def test_what_is_no_method_passes() -> None:
    class Mine(Task):
        val_step = 3
        training_steps = property(lambda self: 5)
        test_steps = torch.nn.Linear

        @staticmethod
        def train_step(batch: Any, batch_idx: int) -> None: ...

        @classmethod
        def configure_optimizer(cls) -> None: ...

    check_hooks(Mine(), Task)


def test_a_step_under_another_name_is_named_where_the_right_one_is_needed() -> None:
    task = with_methods(ScalarWeight, "val_step(self, batch, batch_idx)")
    data = DataLoader(torch.ones(2), 1)
    for run in (
        lambda: quiet_trainer(max_epochs=1).fit(task, data),
        lambda: quiet_trainer(max_epochs=1).fit(task, data, data),
        lambda: quiet_trainer().validate(task, data),
    ):
        with pytest.raises(TypeError, match="did you mean 'validation_step'"):
            run()


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "optimizer_zero_grad(self, epoch, batch_idx, optimizer, optimizer_idx)",
            "takes optimizer_idx.*automatic_opti",
        ),
        ("optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx=0, closure=None)", "takes optimizer_idx"),
        ("training_step(self, batch, batch_idx, optimizer_idx=None)", "takes optimizer_idx"),
        ("lr_scheduler_step(self, scheduler, optimizer_idx, metric)", "takes optimizer_idx"),
        ("backward(self, loss, optimizer, optimizer_idx)", "takes optimizer_idx"),
        ("configure_gradient_clipping(self, optimizer, optimizer_idx, value, kind)", "takes optimizer_idx"),
        ("on_before_optimizer_step(self, optimizer, optimizer_idx)", "takes optimizer_idx"),
        ("optimizer_step(self, epoch, batch_idx, optimizer)", r"expected \(self, epoch, .*optimizer_closure\)"),
        ("training_step(self, batch, batch_idx, hiddens)", r"expected \(self, batch, batch_idx\)"),
        ("training_step(self)", r"expected \(self, batch, batch_idx\)"),
        ("validation_step(self, batch, batch_idx, *, scale)", r"expected \(self, batch, batch_idx\)"),
        ("transfer_batch_to_device(self, batch, device)", r"expected \(self, batch, device, dataloader_idx\)"),
        ("train_dataloader(self, size)", r"expected \(self\)"),
        ("configure_optimizers(self, rate)", r"expected \(self\)"),
        ("setup(self)", r"expected \(self, stage\)"),
    ],
)
def test_methods_that_can_not_take_their_arguments_are_refused(header: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_hooks(with_methods(Task, header), Task)


@pytest.mark.parametrize(
    "header",
    [
        "training_step(self, batch)", "training_step(self, *args, **kwargs)", "training_step(self, batch, i, scale=1.0)",
        "validation_step(self, batch)", "validation_step(self, batch, batch_idx, dataloader_idx)",
        "test_step(self, batch, batch_idx, dataloader_idx=0)", "optimizer_step(self, *args)", "backward(self, loss)",
        "setup(self, stage=None)", "train_dataloader(self, size=3)", "on_test_batch_start(self, batch, batch_idx)",
        "state_dict(self, *args)", "forward(self, x, y, z)", "log(self, name, value)",
    ],
)  # fmt: skip
def test_methods_that_can_pass(header: str) -> None:
    check_hooks(with_methods(Task, header), Task)


# --- strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [Strategy, SingleDeviceStrategy, DDPStrategy])
@pytest.mark.parametrize(
    ("header", "right"),
    [
        ("optimiser_step(self, optimizer)", "optimizer_step"),
        ("all_reduced(self, tensor, op='sum', *, name)", "all_reduce"),
        ("gradients_sync(self, enabled)", "gradient_sync"),
        ("set_up(self)", "setup"),
        ("backwards(self, loss)", "backward"),
    ],
)
def test_a_misspelt_override_of_a_strategy_is_refused(base: type, header: str, right: str) -> None:
    name = header.partition("(")[0]
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called: did you mean '{right}'"):
        quiet_trainer(strategy=with_methods(base, header))


@pytest.mark.parametrize("base", [Strategy, SingleDeviceStrategy, DDPStrategy])
@pytest.mark.parametrize(
    "header",
    [
        "optimizer_step(self)", "all_reduce(self, tensor, op)", "all_reduce(self, tensor, *, name)", "wrap(self, step)",
        "load_model_state(self, task, state)", "place(self, environment)", "setup(self, stage)",
    ],
)  # fmt: skip
def test_an_override_of_a_strategy_must_take_the_arguments(base: type, header: str) -> None:
    name = header.partition("(")[0]
    with pytest.raises(
        TypeError, match=rf"Mine\.{name}\(.*can't take the arguments it is called with: expected \(self"
    ):
        quiet_trainer(strategy=with_methods(base, header))


class Scaled(SingleDeviceStrategy):
    """As a user may write it: an override, and helpers."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(self.scaled(loss), *args, **kwargs)

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().all_reduce(tensor, *args, **kwargs)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def _optimizer_steps(self) -> None: ...

    def report(self) -> None: ...


class More(Scaled):
    def scaled(self, loss: Tensor) -> Tensor:
        return super().scaled(loss) * 2


def test_strategies_of_the_users_own_pass() -> None:
    for strategy in (Strategy(), SingleDeviceStrategy(), DDPStrategy(), Scaled(2.0)):
        check_strategy(strategy)
    task = ScalarWeight()
    quiet_trainer(max_epochs=1, strategy=More(3.0)).fit(task, DataLoader(torch.ones(1), 1))
    assert task.w == 1 - 6
