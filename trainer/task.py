"""`Task`: what to train. The user's model, its steps, its optimizers, and its own hooks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from .data.transfer import move_to_device
from .hyperparameters import HyperparametersMixin

if TYPE_CHECKING:
    from .optimization import LRScheduler
    from .trainer import Trainer


class Task(HyperparametersMixin, nn.Module):
    """An `nn.Module` that says how it is trained. Subclass it; all names are Lightning's.

    Needed for `fit`: `training_step` and `configure_optimizers`. For `validate`, `test` and `predict` the step
    of that name.
    """

    automatic_optimization: bool = True
    """False: `training_step` runs backward and steps by itself, with `optimizers()` and `manual_backward`."""

    strict_loading: bool = True
    """False: loading a checkpoint passes over missing and unexpected keys."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self.logged_in_graph: list[tuple[str, Any, Any, int | None]] | None = None
        """What a compiled step has logged, until the loop takes it; None: the step is not compiled."""

    # --- what you write --------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute the loss of a micro-batch.

        Returns:
            The loss, a scalar that needs a gradient; or a dict with it under `loss`; or None, which counts
            as a micro-batch with a gradient of zero. With manual optimization anything.

            `{"loss": sum, "weight": n}` makes the gradient of a step that of Σ loss / Σ weight over all its micro-batches
            and ranks: the mean over tokens, say, however many there are in each. Then None has no weight.
        """
        raise RuntimeError(f"{type(self).__name__} has no training_step.")  # refused before a run starts

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a validation batch; log with `self.log`. With several loaders also takes `dataloader_idx`."""
        raise RuntimeError(f"{type(self).__name__} has no validation_step.")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a test batch; log with `self.log`. With several loaders also takes `dataloader_idx`."""
        raise RuntimeError(f"{type(self).__name__} has no test_step.")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the prediction for a batch; default: `self(batch)`."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Build optimizers and LR schedulers.

        Returns one of: an optimizer; a list of them; `(optimizers, schedulers)`; a dict
        `{"optimizer": …, "lr_scheduler": …}`; a list of such dicts. A scheduler is the object, or a dict with
        `scheduler` and any of `interval` ("epoch", "step", "validation"), `frequency`, `monitor`, `strict`, `name`.
        """
        raise RuntimeError(f"{type(self).__name__} has no configure_optimizers.")

    def configure_model(self) -> None:
        """Build layers late: on every rank, before the optimizers. Called again in each run: keep what is built."""

    def configure_callbacks(self) -> Any:
        """Callbacks of the task's own: one, or a list. They replace the Trainer's of the same class."""
        return []

    def prepare_data(self) -> None:
        """As `DataModule.prepare_data`."""

    def setup(self, stage: str) -> None:
        """Before `fit`, `validate`, `test` or `predict` (`stage`), on every rank."""

    def teardown(self, stage: str) -> None:
        """After it, also when it failed."""

    def train_dataloader(self) -> Any:
        """The training loader, where none is given to `fit`."""
        return None

    def val_dataloader(self) -> Any:
        """The validation loader, or a list of them."""
        return None

    def test_dataloader(self) -> Any:
        """The test loader, or a list of them."""
        return None

    def predict_dataloader(self) -> Any:
        """The prediction loader, or a list of them."""
        return None

    # --- what you may replace --------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss."""
        self.trainer.strategy.backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, once per step, when they are complete."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer. The closure has nothing left to compute: gradients are complete."""
        optimizer.step(optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the last step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any | None) -> None:
        """Step a scheduler; `metric` is its monitored value, where it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the CPU, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bring a batch to the device."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    # --- what you call ---------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value under a name: a number, a scalar tensor, or a torchmetrics object.

        Args:
            name: the same for this value on every rank; the order of calls may differ.
            value: stays on its device until a step that logs. A torchmetrics object is computed (over all
                ranks) and reset at the end of the epoch.
            prog_bar: show it in the progress bar.
            logger: give it to the loggers (default).
            on_step: log it after every `log_every_n_steps`-th optimizer step: the mean over the window and the
                ranks. Default: in `training_step` and its hooks.
            on_epoch: log it at the end of the epoch, reduced over all batches and ranks. Default: elsewhere.
            reduce_fx: "mean" (weighted by batch size), "sum", "min" or "max", over batches and ranks alike.
            enable_graph: refused; a logged value never keeps a graph alive.
            sync_dist: reduce over the ranks (default, unlike Lightning). False: each rank keeps its own value,
                rank 0's is logged, and nothing may monitor it.
            sync_dist_group: refused; reductions go over all ranks.
            add_dataloader_idx: with several loaders, append `/dataloader_idx_N` to the name.
            batch_size: samples behind the value, its weight in a mean. Default: the first dimension of the
                batch's first tensor.
            metric_attribute: accepted for Lightning's sake; the attribute is found by itself.
            rank_zero_only: log rank 0's value only; nothing may monitor it.

        Raises:
            RuntimeError: nothing is running that could be logged to.
            ValueError, TypeError: the value is no scalar; the name was logged with other arguments before.
        """
        if enable_graph or sync_dist_group is not None:
            raise ValueError(
                f"self.log({name!r}): enable_graph and sync_dist_group are not supported: a logged value keeps no "
                "graph alive, and reductions go over all ranks."
            )
        flags = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        if self.logged_in_graph is not None and torch.compiler.is_compiling():
            self.logged_in_graph.append((name, value, flags, batch_size))
            return
        log = None if self._trainer is None else self._trainer.active_log
        if log is None:
            raise RuntimeError(
                f"self.log({name!r}) where no epoch is running: log from a step, or a hook between on_train_start and "
                "on_train_epoch_end, on_validation_start and on_validation_epoch_end, on_test_start and on_test_epoch_end."
            )
        log.record(name, value, flags, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """Log several values, or a torchmetrics `MetricCollection`; arguments as for `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank 0 only."""
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them, for manual optimization. They are torch's own objects."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The LR scheduler, the list of them, or None, for manual optimization."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward for manual optimization: gradients are averaged over the ranks in it.

        Raises:
            RuntimeError: optimization is automatic.
        """
        if self.automatic_optimization:
            raise RuntimeError("manual_backward needs manual optimization: set self.automatic_optimization = False.")
        self.trainer.strategy.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters; None for the value: do nothing."""
        if gradient_clip_val is not None:
            self.trainer.gradient_norm = self.trainer.strategy.clip_gradients(
                optimizer, float(gradient_clip_val), gradient_clip_algorithm or "norm"
            )

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only this optimizer's parameters need gradients, until `untoggle_optimizer`."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        toggled: dict[int, tuple[Tensor, bool]] = {}
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    toggled.setdefault(id(parameter), (parameter, parameter.requires_grad))
        for key, (parameter, needed) in toggled.items():
            parameter.requires_grad_(needed and key in mine)
        self._toggled = list(toggled.values())

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, needed in self.__dict__.pop("_toggled", []):
            parameter.requires_grad_(needed)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Generator[None]:
        """`toggle_optimizer` for the body of a `with`."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Tensor) -> Tensor:
        """Every rank's tensor (same shape on all), stacked: `[world_size, *data.shape]`; no gradient flows back.

        Raises:
            RuntimeError: inside training_step with uneven_inputs="join": a rank without data would not come.
        """
        log = self.trainer.active_log
        if self.trainer.strategy.uneven_inputs == "join" and log is not None and log.in_step:
            raise RuntimeError(
                "all_gather in a training step with uneven_inputs='join': a rank without data runs no training_step, and "
                "the others would wait for it. Gather in on_train_epoch_end, or use uneven_inputs='stop'."
            )
        return self.trainer.strategy.all_gather(data.detach(), name="Task.all_gather")

    def freeze(self) -> None:
        """Let no parameter need a gradient, and go to eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Let all parameters need gradients, and go to train mode."""
        self.requires_grad_(True)
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: torch.device | str | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the task from a checkpoint's hyperparameters, and load its weights.

        Args:
            checkpoint_path: the checkpoint's folder.
            map_location: the device to put it on. Default: the CPU.
            strict: refuse missing and unexpected keys. Default: `strict_loading`.
            kwargs: arguments of `__init__` that replace the hyperparameters, or that were not saved.

        Raises:
            CheckpointError: there is no intact checkpoint.
            TypeError: `__init__` needs an argument that is neither in the checkpoint nor given.
        """
        from .checkpoint import read_checkpoint
        from .checkpoint.weights import own_buffers

        checkpoint = read_checkpoint(checkpoint_path)
        arguments: dict[str, Any] = {**checkpoint.training.get("hyper_parameters", {}), **kwargs}
        parameters = inspect.signature(cls.__init__).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            accepted = {parameter.name for parameter in parameters}
            arguments = {name: value for name, value in arguments.items() if name in accepted or name in kwargs}
        try:
            task = cls(**arguments)
        except TypeError as error:
            raise TypeError(
                f"{cls.__name__} can't be built from the hyperparameters in {os.fspath(checkpoint_path)} "
                f"({', '.join(arguments) or 'none'}): {error}. Give what is missing as keyword arguments, or call "
                "self.save_hyperparameters() in __init__."
            ) from error
        task.configure_model()
        own_buffers(task)
        task.on_load_checkpoint(checkpoint.as_dict())
        task.load_state_dict(checkpoint.model, strict=task.strict_loading if strict is None else strict)
        return task.to(map_location or "cpu")

    # --- where the run stands --------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer of the current run.

        Raises:
            RuntimeError: there is none.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer: this works during a run only.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    @property
    def attached_trainer(self) -> Trainer | None:
        """The trainer of the last run, or None."""
        return self._trainer

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0; 0 outside of a run."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far; 0 outside of a run."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def device(self) -> torch.device:
        """Where the task's tensors belong."""
        for tensor in self._tensors():
            return tensor.device
        return torch.device("cpu") if self._trainer is None else self._trainer.strategy.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point parameter or buffer."""
        for tensor in self._tensors():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    def _tensors(self) -> Iterable[Tensor]:
        yield from self.parameters()
        yield from self.buffers()

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return [] if self._trainer is None else list(self._trainer.loggers)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the task (for an average of weights, say) must not copy the trainer with it.
        return {**self.__dict__, "_trainer": None}

    # --- hooks -----------------------------------------------------------------------------
    # As those of `Callback`, without `trainer` and `task`.

    def on_fit_start(self) -> None:
        """Model and optimizers are built and on their device."""

    def on_fit_end(self) -> None:
        """Fit is over."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """After the last batch of an epoch and its validation; metrics can still be logged."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch. Return -1 to skip the rest of the epoch (on one rank only)."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch, and after the optimizer step where it was the window's last."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before the gradients of the last step are dropped."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before a backward; `loss` is divided by the window's size."""

    def on_after_backward(self) -> None:
        """After a backward."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are complete, and not yet clipped."""

    def on_validation_start(self) -> None:
        """Before validation."""

    def on_validation_end(self) -> None:
        """After validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch; metrics can still be logged."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_validation_model_eval(self) -> None:
        """Go to eval mode for validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Leave it again. By default each module gets back the mode it had; an override does this by itself."""

    def on_validation_model_zero_grad(self) -> None:
        """Called by validation inside fit: drop gradients here, if memory is short."""

    def on_test_start(self) -> None:
        """Before testing."""

    def on_test_end(self) -> None:
        """After testing."""

    def on_test_epoch_start(self) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch; metrics can still be logged."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_test_model_eval(self) -> None:
        """Go to eval mode for testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Leave it again. By default each module gets back the mode it had; an override does this by itself."""

    def on_predict_start(self) -> None:
        """Before prediction."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """After the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a prediction batch."""

    def on_predict_model_eval(self) -> None:
        """Go to eval mode for prediction."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Leave it again. By default each module gets back the mode it had; an override does this by itself."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written: add to `checkpoint` or change it, in place."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read, and nothing is restored yet."""
