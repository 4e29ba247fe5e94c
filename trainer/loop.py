"""The training loop. Read `TrainingLoop.train_step` first: one optimizer step, in the order of the mathematics.

fit:    for each epoch:  train_epoch
epoch:  for each window: train_step, then what is due: log, validate, stop
step:   for each micro-batch of the window: forward, backward;  then clip, update, schedule
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..strategies.base import Strategy
from ..strategies.clipping import parameters_of
from .data.uneven import uneven_windows
from .data.windows import Window, windows
from .divergence import SkippedSteps
from .hooks import overrides
from .metrics.log import MetricLog
from .metrics.objects import load_metric_states, metric_states
from .task import Task
from .weighted_loss import WeightedLoss, agreed, check_weight_name

if TYPE_CHECKING:
    from .fit import FitRun


NO_BATCH = object()
"""In the place of a batch: this rank has none left, and takes part in the step with a gradient of zero."""


class StepModule(nn.Module):
    """What the strategy wraps: its forward is the task's `training_step`, so that DDP sees the step begin."""

    def __init__(self, task: Task, *, finds_unused: bool) -> None:
        super().__init__()
        self.task, self.finds_unused = task, finds_unused
        self.gave_none = False
        """Whether the loss is a zero in the place of None; taken back by whoever asks."""
        # A bound method, since looking up a submodule goes through nn.Module's slow __getattr__.
        self.training_step = with_batch_index(task.training_step)
        self.manual = not task.automatic_optimization

    def forward(self, batch: Any, batch_idx: int) -> Any:
        """Run the step; None becomes a loss of zero, so that this rank's backward pairs with its peers'."""
        output = None if batch is NO_BATCH else self.training_step(batch, batch_idx)
        if output is None and not self.manual:
            self.gave_none = True
            return self.zero_loss()
        return output

    def zero_loss(self) -> Tensor | float:
        """A loss whose gradients are zero: of all parameters, since DDP waits for each; else of one will do."""
        parameters = [parameter for parameter in self.task.parameters() if parameter.requires_grad]
        return sum(p.flatten()[:0].abs().sum() for p in parameters[: 1 if self.finds_unused else None])


class TrainingLoop:
    """Takes the optimizer steps of a fit."""

    def __init__(self, run: FitRun) -> None:
        self.run, self.trainer, self.task, self.strategy = run, run.trainer, run.task, run.trainer.strategy
        self.hooks, self.progress, self.control = run.hooks, run.trainer.progress, run.control
        config = run.trainer.config
        self.step_module = StepModule(self.task, finds_unused=self.strategy.finds_unused_parameters)
        self.trainable: list[bool] = []
        self.wrap()
        self.optimizers = run.trainer.optimizers
        self.clip_limit, self.clip_algorithm = config.gradient_clip_val, config.gradient_clip_algorithm
        self.log_interval, self.window = config.log_every_n_steps, config.accumulate_grad_batches
        self.step_schedulers = run.schedulers.at("step")
        self.skipped = None if config.skip_nonfinite is None else SkippedSteps(self.strategy, config.skip_nonfinite)
        self.backward: Callable[[Tensor], None] = self.strategy.backward
        if overrides(self.task, "backward", Task):
            self.backward = self.task.backward
        self.zero_grad = self._zero_grad_of_task if overrides(self.task, "optimizer_zero_grad", Task) else zero_grad
        kind = type(self.strategy)
        self.unscales = self.strategy.scaler is not None or kind.unscale_gradients is not Strategy.unscale_gradients
        self.clips_itself = overrides(self.task, "configure_gradient_clipping", Task)
        self.steps_itself = overrides(self.task, "optimizer_step", Task)
        self.take_step = self.train_step if self.task.automatic_optimization else self.manual_step
        self.train_window = self.take_step if run.uneven is None else self.uneven_step
        self.logged_in_graph = self.task.logged_in_graph = [] if self.strategy.compiles else None
        self.log = MetricLog(self.strategy, self.task, weighted_steps=self.window > 1)
        self.steps_happened = 0  # counted by hooks on the optimizers, where the task calls them itself
        if self.steps_itself or not self.task.automatic_optimization:
            self._count_steps()
        # Whether losses come with a weight; None: not known before the first.
        self.weighted: bool | None = None if self.task.automatic_optimization else False
        self.weights = WeightedLoss(self.strategy)
        self._weight_seen: bool | None = None  # in the running step
        self.skip_epoch = False
        self.length: int | None = None
        self.last_active: int | None = None
        """The highest rank that had data in the last step, where some ranks had none."""

    def wrap(self) -> None:
        """Wrap the step, again where parameters were frozen or unfrozen: DDP would leave new ones to each rank."""
        trainable = [parameter.requires_grad for parameter in self.task.parameters()]
        if trainable != self.trainable:
            self.trainable = trainable
            self.model = self.strategy.wrap(self.step_module, manual=not self.task.automatic_optimization)

    @property
    def is_between_steps(self) -> bool:
        """Whether a run could go on from here: no step, validation or end of an epoch is under way."""
        return self.run.between_steps and not self.log.in_step

    def let_go(self) -> None:
        """Drop what the strategy wrapped; what a checkpoint needs stays."""
        del self.model

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, and is the same on all ranks."""
        state: dict[str, Any] = {"weighted": self.weighted, "weights": self.weights.state_dict()}
        if self.skipped is not None:
            state["skipped"] = self.skipped.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.weighted = state["weighted"]
        self.weights.load_state_dict(state["weights"])
        if self.skipped is not None and "skipped" in state:
            self.skipped.load_state_dict(state["skipped"])

    def metrics_state_dict(self) -> dict[str, Any]:
        """What this rank has logged and counted and nobody has read yet; of an epoch that was cut short, all of it."""
        if self.run.cut_short is not None:
            return self.run.cut_short
        return {"log": self.log.state_dict(), "objects": metric_states(self.task)}

    def load_metrics_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.log.load_state_dict(state["log"])
        load_metric_states(self.task, state["objects"])

    # --- one step --------------------------------------------------------------------------

    def train_step(self, window: Window) -> None:
        """One optimizer step: the mean gradient of the window's micro-batches over all ranks, clipped, applied once."""
        trainer, task, strategy, hooks = self.trainer, self.task, self.strategy, self.hooks
        optimizer = self.optimizers[0]
        for hook in hooks.on_before_zero_grad:
            hook(trainer, task, optimizer)
        self.zero_grad(optimizer)
        to_go, divisor, micro_batches, _ = window
        for batch in micro_batches:
            to_go -= 1
            batch_idx = self.begin_batch(batch)
            if self.skip_epoch:
                break
            with strategy.gradient_sync(to_go == 0), strategy.autocast():  # DDP decides in forward
                output = self.model(batch, batch_idx)
                loss = loss_of(output, task)
                if self.weighted is not False:
                    loss = self.weigh(loss, output, divisor)
                elif divisor != 1:
                    loss = loss / divisor  # a mean over the micro-batches that are there: a short window is one, too
                for hook in hooks.on_before_backward:
                    hook(trainer, task, loss)
                self.backward(loss)
            for hook in hooks.on_after_backward:
                hook(trainer, task)
            if self.logged_in_graph:
                self.record_logged()
            if not to_go:
                self.update(optimizer)
            self.end_batch(output, batch, batch_idx)

    def empty_step(self) -> None:
        """The step of a rank that has no data left: its gradient is zero, its update is that of all."""
        optimizer = self.optimizers[0]
        self.zero_grad(optimizer)
        with self.strategy.gradient_sync(True), self.strategy.autocast():
            self.backward(loss_of(self.model(NO_BATCH, -1), self.task))
        self.update(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip once, step once, and move what moves with steps: the counter and the step schedulers."""
        if self.weighted is not False:
            self.finish_weights(optimizer)
        if self.unscales:
            self.strategy.unscale_gradients(optimizer)
        for hook in self.hooks.on_before_optimizer_step:
            hook(self.trainer, self.task, optimizer)
        if self.skipped is not None and self.skipped.must_skip(optimizer, self.progress.global_step):
            return
        if self.clips_itself:
            self.task.configure_gradient_clipping(optimizer, self.clip_limit, self.clip_algorithm)
        elif self.clip_limit is not None:
            norm = self.strategy.clip_gradients(optimizer, self.clip_limit, self.clip_algorithm)
            self.trainer.gradient_norm = norm
        stepped = self._step_of_task(optimizer) if self.steps_itself else self.strategy.optimizer_step(optimizer)
        if stepped:
            self.progress.global_step += 1
            for config in self.step_schedulers:
                if self.progress.global_step % config.frequency == 0:
                    self.run.schedulers.step(config)
        elif stepped is not False:
            raise TypeError(
                f"{type(self.strategy).__name__}.optimizer_step returned {stepped!r}: expected True, or False where the step "
                "was skipped. An override returns what super().optimizer_step(optimizer) returned."
            )

    def manual_step(self, window: Window) -> None:
        """One micro-batch of a task that optimizes by itself; a step, if any of its optimizers stepped."""
        for batch in window.batches:
            batch_idx, before = self.begin_batch(batch), self.steps_happened
            if self.skip_epoch:
                break
            with self.strategy.autocast():
                output = self.model(batch, batch_idx)
            if self.steps_happened > before:
                self.progress.global_step += 1
            self.end_batch({} if output is None else output, batch, batch_idx)

    def uneven_step(self, window: Window) -> None:
        """A step that some ranks may have fewer micro-batches for, or none. Each counts those of the rank with most."""
        counts, before = window.counts or [], self.progress.batch_idx
        active = [rank for rank, count in enumerate(counts) if count]
        if len(active) < len(counts):
            self.strategy.join(active)
            self.last_active = active[-1]
        self.log.has_batch = window.size > 0
        if window.size:
            self.take_step(window)
        else:
            self.empty_step()
        behind = before + max(counts) - self.progress.batch_idx
        self.progress.batch_idx += behind
        self.progress.batches_since_validation += behind
        self.trainer.is_last_batch = self.progress.batch_idx == self.length

    def begin_batch(self, batch: Any) -> int:
        """Announce a micro-batch; return its index in the epoch."""
        batch_idx = self.progress.batch_idx
        self.log.batch = batch
        self.trainer.is_last_batch = batch_idx + 1 == self.length
        for hook in self.hooks.on_train_batch_start:
            if hook(self.trainer, self.task, batch, batch_idx) == -1:
                self._skip_rest_of_epoch()
        return batch_idx

    def end_batch(self, output: Any, batch: Any, batch_idx: int) -> None:
        """Count a micro-batch, and announce its end."""
        self.progress.batch_idx = batch_idx + 1
        self.progress.batches_seen += 1
        self.progress.batches_since_validation += 1
        self.log.count_batch()
        if self.hooks.on_train_batch_end:
            outputs = _detached(output)
            for hook in self.hooks.on_train_batch_end:
                hook(self.trainer, self.task, outputs, batch, batch_idx)

    # --- one epoch -------------------------------------------------------------------------

    def train_epoch(self) -> None:
        """Train one epoch, or what is left of it: its steps, and after each what is due."""
        run, trainer, progress, log, control = self.run, self.trainer, self.progress, self.log, self.control
        validations, saves = run.validations, trainer.saves
        run.cut_short = None
        batches = run.batches_of_epoch(progress.epoch)
        length = self.length = run.length
        trainer.active_log = log
        self.skip_epoch = trainer.is_last_batch = False
        for hook in self.hooks.on_train_epoch_start:
            hook(trainer, self.task)
        self.wrap()
        self.strategy.check_same_parameters(self.task)
        if run.resumption is not None:
            run.resumption.take_up(self)
        if validations.due_at <= progress.batch_idx != length:  # a signal ended the run before in it
            run.validate(log)
            for hook in self.hooks.on_train_step_end:
                hook(trainer, self.task)
        for window in run.loaders.on_device(self.windows(batches)):
            before = progress.global_step
            log.begin_step()
            self.train_window(window)
            log.end_step()
            if progress.global_step != before and progress.global_step % self.log_interval == 0:
                run.log_step(log, self.skipped)
            if run.deadline is not None and time.monotonic() > run.deadline:
                trainer.stop("max_time is over")
            if flags := control.poll():
                run.follow(flags)
            if validations.due_at <= progress.batch_idx != length:  # at an epoch's last batch, its end does it
                run.validate(log)
            for hook in self.hooks.on_train_step_end:
                hook(trainer, self.task)
            if saves.waiting:
                saves.write_waiting()
            if run.leaving and progress.batch_idx != length:
                run.leave()
            if self.skip_epoch or run.is_done():
                break
        else:
            if length is not None and progress.batch_idx < length:
                raise RuntimeError(
                    f"the training loader gave {progress.batch_idx} batches, but its length is {length}"
                    f"{': the other ranks would wait for more' if trainer.world_size > 1 else ''}. Correct the dataset (an item "
                    "that raises StopIteration?) or its __len__, or set limit_train_batches."
                )
            length = progress.batch_idx
        if self.last_active is not None:
            run.bring_together(self.last_active)
            self.last_active = None
        run.finish_epoch(log, whole=self.skip_epoch or progress.batch_idx == length)

    def windows(self, batches: Iterator[Any]) -> Iterator[Window]:
        """The windows of what is left of the epoch."""
        if self.run.uneven is not None:
            return uneven_windows(batches, self.window, self.strategy, join=self.run.uneven == "join")
        return windows(batches, self.window, None if self.length is None else self.length - self.progress.batch_idx)

    # --- helpers of a step -----------------------------------------------------------------

    def weigh(self, loss: Tensor, output: Any, divisor: float) -> Tensor:
        """The loss for the backward, where losses have a weight, or may have one."""
        if self.step_module.gave_none:  # a weight of zero
            self.step_module.gave_none = False
            return loss
        has_weight = output.__class__ is dict and "weight" in output
        if self._weight_seen not in (None, has_weight) or self.weighted not in (None, has_weight):
            raise ValueError(
                f'{type(self.task).__name__}.training_step returns a loss with a "weight" in some micro-batches only: '
                "expected it in all, or in none."
            )
        if self.weighted is None:  # in the first step
            check_weight_name(self.task, output)
        self._weight_seen = has_weight
        return self.weights.divide(loss, output["weight"]) if has_weight else loss / divisor

    def finish_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """After the first step all ranks know whether losses have weights; where they do, correct the gradients."""
        if self.weighted is None:
            self.weighted = agreed(self.strategy, self._weight_seen)
            if self.weighted:
                self.strategy.check_weighted()
        if self.weighted:
            self.weights.correct(parameters_of(optimizer))
        self._weight_seen = None

    def record_logged(self) -> None:
        """Take what a compiled step logged: `self.log` in it only notes the values, which breaks no graph."""
        noted = self.logged_in_graph or []
        for name, value, flags, batch_size in noted:
            self.log.record(name, value, flags, batch_size)
        noted.clear()

    def _zero_grad_of_task(self, optimizer: torch.optim.Optimizer) -> None:
        self.task.optimizer_zero_grad(self.progress.epoch, self.progress.batch_idx, optimizer)

    def _step_of_task(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.steps_happened
        self.task.optimizer_step(self.progress.epoch, self.progress.batch_idx, optimizer, lambda: None)
        return self.steps_happened > before

    def _count_steps(self) -> None:
        """See the steps of optimizers that are called by the task itself."""

        def count(*_: Any) -> None:
            self.steps_happened += 1

        def announce(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not self.task.automatic_optimization:
                for hook in self.hooks.on_before_optimizer_step:
                    hook(self.trainer, self.task, optimizer)

        for optimizer in self.optimizers:
            self.run.cleanup.callback(optimizer.register_step_post_hook(count).remove)
            self.run.cleanup.callback(optimizer.register_step_pre_hook(announce).remove)

    def _skip_rest_of_epoch(self) -> None:
        if self.strategy.world_size > 1:
            raise RuntimeError(
                f"on_train_batch_start returned -1 on rank {self.strategy.rank}: with several ranks the others would wait "
                "for this one. Use trainer.stop(reason), which all ranks follow, or limit_train_batches."
            )
        self.skip_epoch = True
        self.weights.forget()  # the gradients of a window that is left are dropped, too
        self._weight_seen = None


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients: `optimizer.zero_grad()` without the profiler's frame, which costs as much as a small step."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def loss_of(output: Any, task: Task) -> Tensor:
    """The loss in what `training_step` returned.

    Raises:
        TypeError, ValueError: there is none, it is no scalar, or it needs no gradient.
    """
    loss: Any = output
    if output.__class__ is dict:
        loss = output.get("loss")
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{type(task).__name__}.training_step returned {_named(output)}: expected the loss (a scalar tensor), "
            'a dict with it under "loss", or None.'
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss that {type(task).__name__}.training_step returned needs no gradient, so there is nothing to "
            "train: it was detached, computed under no_grad, or no parameter with requires_grad went into it."
        )
    if loss.is_complex():
        raise ValueError(
            f"{type(task).__name__}.training_step returned a complex loss: expected a real scalar, such as its .abs() or .real."
        )
    if loss.dim():
        raise ValueError(
            f"{type(task).__name__}.training_step returned a loss of shape {list(loss.shape)}: expected a scalar. "
            "Take its mean."
        )
    return loss


def _named(output: Any) -> str:
    if isinstance(output, dict):
        return f"a dict with {', '.join(map(repr, output)) or 'nothing'}"  # pyright: ignore
    return f"a {type(output).__name__}"


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, dict):
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in output.items()}  # pyright: ignore
    return output


def with_batch_index(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as a function of batch and index, also where it takes the batch only."""
    import inspect

    parameters = inspect.signature(step).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return lambda batch, batch_idx: step(batch)  # pyright: ignore
    return step
