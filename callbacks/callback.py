"""`Callback`: the base class, with every hook there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..trainer import Task, Trainer


class Callback:
    """Watches a run. Override the hooks you need; one that nobody overrides costs nothing.

    Names and signatures are Lightning's. A method `on_…` that is no hook, or takes other arguments, is
    refused when the Trainer is built. Hooks run in the order of the list, the task's own hook after the
    callbacks', and the callbacks that decide by metrics (`monitors`) last, when all metrics are in.

    A callback observes; to end the run it calls `trainer.stop(reason)`. All ranks run every hook: what one
    rank only may do goes under `if trainer.is_global_zero:`, and must not communicate there.
    """

    monitors: ClassVar[bool] = False
    """True: its hooks run last, when the metrics of the epoch are reduced."""

    keeps_state_in_rollback: ClassVar[bool] = False
    """True: a rollback of the parameters leaves its state alone."""

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint. Two callbacks of one class get numbers behind it."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def rank_state_dict(self) -> dict[str, Any]:
        """What a resumed run needs and differs from rank to rank; it goes into each rank's own file."""
        return {}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `rank_state_dict` returned on this rank; on another number of ranks it is not called."""

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Before fit, validate, test or predict (`stage`); the model may not be built yet."""

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """After fit, validate, test or predict, also when it failed."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Model and optimizers are built and on their device."""

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Fit is over."""

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        """Before the few validation batches that are run before training."""

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        """After them."""

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Before the first epoch."""

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """After the last batch of an epoch and its validation."""

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch. Return -1 to skip the rest of the epoch (on one rank only)."""

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch, and after the optimizer step where it was the window's last.

        `outputs` is a dict: `loss`, detached, as `training_step` returned it, and what else it returned.
        """

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """After an optimizer step, and after the log and the validation that were due at it. Not Lightning's."""

    def on_before_zero_grad(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Before the gradients of the last step are dropped."""

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        """Before a backward; `loss` is divided by the window's size."""

    def on_after_backward(self, trainer: Trainer, task: Task) -> None:
        """After a backward."""

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        """Gradients are complete, and not yet clipped."""

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Before validation."""

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """After validation; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """After the last validation batch; metrics can still be logged."""

    def on_validation_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch; `outputs` is what `validation_step` returned."""

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        """Before testing."""

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        """After testing."""

    def on_test_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """After the last test batch; metrics can still be logged."""

    def on_test_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test batch; `outputs` is what `test_step` returned."""

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        """Before prediction."""

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        """After prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """After the last prediction batch."""

    def on_predict_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a prediction batch; `outputs` is what `predict_step` returned."""

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """The run fails with this exception, on this rank."""

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written: add to `checkpoint` or change it, in place."""

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read, and nothing is restored yet."""
