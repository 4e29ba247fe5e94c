"""One `fit`: what is prepared before the loop, and what the loop asks for between its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from ..callbacks.step_panel import StepPanel
from .agreement import compare, optimizers_of
from .checkpoint import Checkpoint
from .control import LEAVE, STOP, WRITTEN, ControlWord
from .data.epoch_length import Uneven, epoch_length, uneven_policy
from .divergence import SkippedSteps
from .evaluation import VALIDATION, EvaluationEnded, EvaluationLoop
from .fit_loaders import FitLoaders
from .hooks import HookTable, overrides
from .loop import TrainingLoop
from .metrics.log import MetricLog
from .optimization import configure_optimizers
from .plan import make_plan
from .randomness import derived_seed, kept_rng, rng_state, seed_everything, set_rng_state
from .resume import Resumption
from .scheduler_steps import SchedulerSteps
from .signals import name_of, preempted
from .task import Task
from .task_check import check_optimization
from .validation_schedule import ValidationSchedule

if TYPE_CHECKING:
    from .trainer import Trainer


class FitRun:
    """The state of one fit that no checkpoint keeps."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        hooks: HookTable,
        loaders: FitLoaders,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.trainer, self.task, self.hooks, self.loaders = trainer, task, hooks, loaders
        self.control: ControlWord = trainer.control
        self.cleanup = ExitStack()
        self.stopping = False
        """All ranks agreed to stop; followed as soon as `min_epochs` and `min_steps` allow."""
        self.leaving = False
        """All ranks agreed to leave after a signal; followed behind the running step."""
        self.deadline: float | None = None
        self.resumption = None if checkpoint is None else Resumption(trainer, checkpoint)
        """What the fit goes on from; None: it begins anew."""
        self.between_steps = True
        """Whether no validation and no end of an epoch is running: a checkpoint of that moment could not be resumed."""
        self.cut_short: dict[str, Any] | None = None
        """Of an epoch that ended before its last batch, what was logged in it: a resumed run ends it once more, whole."""
        config = trainer.config
        self.uneven: Uneven | None = uneven_policy(loaders.training, trainer.strategy)
        """What happens when loaders end apart: "stop" or "join"; None: they can't."""
        self.length = epoch_length(loaders.training, trainer.strategy, self.uneven)
        """Batches of an epoch, on every rank; None where it can't be known."""
        self.validations = ValidationSchedule(config, trainer.progress, self.length, validates=bool(loaders.validation))
        """When it validates."""
        self.schedulers = SchedulerSteps(trainer, task)
        """Steps the LR schedulers."""
        self._max_steps = config.max_steps if config.max_steps >= 0 else float("inf")
        self._evaluation: EvaluationLoop | None = None
        if loaders.validation:
            self._evaluation = EvaluationLoop(trainer, task, hooks, VALIDATION, loaders.validation, loaders.transfer)

    def start(self) -> TrainingLoop:
        """Build optimizers, resume, wrap, check the validation; return the loop, ready for its first epoch."""
        trainer, config = self.trainer, self.trainer.config
        check_optimization(self.task, config, trainer.strategy)
        trainer.plan = make_plan(
            config, self.loaders.training, self.length, self.loaders.validation, trainer.world_size
        )
        trainer.optimizers, trainer.lr_scheduler_configs = configure_optimizers(self.task)
        trainer.strategy.prepare_optimizers(trainer.optimizers, self.task)
        if self.resumption is not None:
            self.resumption.restore(self.validations)
        compare(trainer.strategy, optimizers_of(trainer.optimizers), "optimizers")
        self._loop = loop = TrainingLoop(self)
        trainer.training_loop = loop
        self.cleanup.callback(loop.let_go)
        if not callable(loop.model):
            raise TypeError(
                f"{type(trainer.strategy).__name__}.wrap returned {loop.model!r}: expected what is to be called for a step."
            )
        self._first_step = trainer.global_step
        self._first_batch = trainer.progress.batches_seen
        if trainer.progress.epochs_scheduled < trainer.progress.epochs_done:  # saved by a hook of an epoch's end
            self.schedulers.end_epoch()
        self._seed_ranks()
        self._call("on_fit_start")  # from here on the loggers know where they go on
        self._log_hyperparameters()
        trainer.signals.control = self.control  # from here on there is somebody who asks
        if self.resumption is None:
            self._sanity_check()
        else:
            self.resumption.restore_loop(loop)
        limit = config.time_limit()
        self.deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        trainer.training, trainer.active_log = True, loop.log
        self._call("on_train_start")
        if not any(isinstance(callback, StepPanel) for callback in trainer.callbacks):  # else the panel says it
            for label, remark in trainer.plan.remarks.items():
                trainer.print(f"{label}: {remark}")
        if self.resumption is not None:
            if not trainer.progress.batch_idx:
                self.resumption.take_up(loop)
            self.follow(self.control.settle())  # the run before may have been stopped, and saved when it was
        return loop

    def finish(self) -> None:
        """Announce the end, and say why it came early, or that it came to nothing."""
        self.trainer.wait_for_checkpoint()
        self.trainer.strategy.check_same_parameters(self.task, name="parameters at the end")
        self._tell_if_nothing_was_trained()
        self._call("on_train_end")
        if self.stopping:
            reasons = self.trainer.strategy.gather_objects(self.trainer.stop_reason, name="reasons to stop")
            first = next((reason for reason in reasons if reason), "asked to")
            self.trainer.stop_reason = first
            self.trainer.print(f"stopped after step {self.trainer.global_step}: {first}")
        self.trainer.training = False
        self._call("on_fit_end")
        folder = self.trainer.run_folder
        if self.trainer.is_global_zero and self.trainer.writes and folder.is_dir() and any(folder.iterdir()):
            self.trainer.print(f"output in {folder}")

    def _tell_if_nothing_was_trained(self) -> None:
        trainer = self.trainer
        if trainer.global_step > self._first_step:
            return
        if trainer.progress.batches_seen == self._first_batch and self.uneven == "stop":
            told = "a rank had no data, and with uneven_inputs='stop' all end with it"
        elif trainer.strategy.scaler is not None:
            told = "at precision='16-mixed' every step had gradients of inf or NaN, and was skipped. Use bf16-mixed"
        elif not self.task.automatic_optimization:
            told = "training_step called no optimizer.step()"
        else:
            return
        trainer.print(f"nothing was trained: {told}")

    def has_next_epoch(self) -> bool:
        """Move to the next epoch, if there is one to be trained."""
        progress, most = self.trainer.progress, self.trainer.config.max_epochs
        progress.begin_next_epoch()
        return (most in (None, -1) or progress.epoch < most) and not self.is_done()

    def _seed_ranks(self) -> None:
        """From here on every rank draws its own random numbers, all of them functions of the run's seed."""
        if self.trainer.config.seed is not None or self.trainer.world_size > 1:
            seed_everything(derived_seed(self.trainer.seed, self.trainer.global_rank, "rank"))

    def _log_hyperparameters(self) -> None:
        """Hand those of data module and task to the loggers, on rank 0."""
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        hyperparameters: dict[str, Any] = {}
        for holder in (trainer.datamodule, self.task):
            if holder is not None and holder.logs_hyperparameters:
                hyperparameters |= holder.hparams
        if hyperparameters:
            for logger in trainer.loggers:
                logger.log_hyperparams(hyperparameters)

    def _sanity_check(self) -> None:
        batches = self.trainer.config.num_sanity_val_steps
        if self._evaluation is None or not batches:
            return
        self.trainer.sanity_checking = True
        self._call("on_sanity_check_start")
        try:
            with kept_rng():  # training draws the same random numbers with and without it
                self.between_steps = False
                self._evaluation.run(most=None if batches < 0 else batches, control=self.control)
                self.between_steps = True
        except EvaluationEnded:
            self.leave()
        self._call("on_sanity_check_end")
        self.trainer.sanity_checking = False
        self.trainer.saves.write_waiting()

    # --- what the loop asks for ------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether no further step is to be taken."""
        progress = self.trainer.progress
        if progress.global_step >= self._max_steps:
            return True
        if not self.stopping:
            return False
        config = self.trainer.config
        return progress.epochs_done >= (config.min_epochs or 0) and progress.global_step >= (config.min_steps or 0)

    def batches_of_epoch(self, epoch: int) -> Iterator[Any]:
        """What is left of the training batches of an epoch, in its order, and as many on every rank.

        Raises:
            RuntimeError: on every rank, with all lengths.
        """
        if self.loaders.of_epoch(epoch) and self._evaluation is not None:
            self._evaluation.loaders = self.loaders.validation
        loader, progress = self.loaders.training, self.trainer.progress
        loader.set_epoch(epoch)
        order = loader.order_digest() if self.trainer.world_size > 1 else None
        self.length = epoch_length(loader, self.trainer.strategy, self.uneven, order)
        self.validations.begin_epoch(self.length)
        window = self.trainer.config.accumulate_grad_batches
        whole_windows = self.uneven is not None or (self.length is None and window > 1)
        loader.read_ahead = 2 * window if whole_windows else 0
        return self.loaders.batches(progress.batch_idx, whole_windows=whole_windows)

    def follow(self, flags: int) -> None:
        """Do what all ranks agreed on at this step.

        Raises:
            CheckpointError: a checkpoint could not be written in the background.
        """
        if flags & STOP:
            self.stopping = True
        if flags & LEAVE:
            self.leaving = True
        if flags & WRITTEN:
            self.trainer.checkpoint_writer.settle(self.control.agreed_written)

    def bring_together(self, source: int) -> None:
        """An epoch is over that some ranks had no data for at its end: what they missed comes from one that had."""
        trainer, strategy = self.trainer, self.trainer.strategy
        trainer.wait_for_checkpoint()  # callbacks' state must not hold what is on its way
        strategy.synchronize(self.task)
        strategy.join(range(strategy.world_size))
        states = [callback.state_dict() for callback in trainer.callbacks]
        theirs = strategy.broadcast(states, source=source, name="state of the callbacks")
        for callback, mine, state in zip(trainer.callbacks, states, theirs, strict=True):
            if mine or state:
                callback.load_state_dict(state)

    def log_step(self, log: MetricLog, skipped: SkippedSteps | None) -> None:
        """Reduce and publish the values of a step."""
        logged = log.reduce_step()
        norm = self.trainer.gradient_norm
        if norm is not None:
            logged.for_logger["grad_norm"] = logged.for_callbacks["grad_norm"] = float(norm)
        if skipped is not None:
            logged.for_logger["skipped_steps"] = logged.for_callbacks["skipped_steps"] = float(skipped.total)
        self.trainer.metrics.publish(logged, log)

    def finish_epoch(self, log: MetricLog, *, whole: bool) -> None:
        """What ends an epoch: validation, its hooks and metrics, schedulers, and those who decide by metrics.

        `whole`: it went to its last batch, so that a resumed run begins the next one.
        """
        trainer, progress = self.trainer, self.trainer.progress
        self.between_steps = False
        if whole:
            progress.epochs_done = progress.epoch + 1
            if self.validations.is_due_at_end():
                self.validate(log)
        else:
            self.cut_short = self._loop.metrics_state_dict()
        trainer.metrics.publish(log.reduce_epoch(with_step=True), log)
        if self.hooks.on_train_epoch_end:  # they may read what is there, and log more
            self._call("on_train_epoch_end")
            trainer.metrics.publish(log.reduce_epoch(), log)
        log.close_epoch()
        trainer.active_log = None
        if whole:
            self.schedulers.end_epoch()
        self.between_steps = True
        for hook in self.hooks.monitor_train_epoch_end:
            hook(trainer, self.task)
        trainer.saves.write_waiting()
        self.follow(self.control.settle())
        if self.leaving:
            self.leave()

    # --- after a signal --------------------------------------------------------------------

    def leave(self) -> NoReturn:
        """Save so that the run can go on from here, whatever is due, and end it. All ranks come here at the same step."""
        trainer = self.trainer
        self.between_steps = True
        keeper = trainer.checkpoint_callback
        name = name_of(self.control.signal)
        where = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
        if keeper is None:
            saved = "nothing is saved, since there is no ModelCheckpoint"
        else:
            saved = f'saved in {keeper.save_to_resume(trainer)}; ckpt_path="auto" goes on from there'
        text = f"{name} received ({where}): {saved}"
        trainer.print(f"samestep: {text}", flush=True)
        raise preempted(self.control.signal, text, agreed=True)

    # --- validation ------------------------------------------------------------------------

    def validate(self, log: MetricLog) -> None:
        """Validate, step what steps with validations, and come back to training."""
        trainer = self.trainer
        assert self._evaluation is not None
        if self.leaving:
            self._leave_before_validation()
        random_numbers = rng_state()
        trainer.training, trainer.validating = False, True
        before, self.between_steps = self.between_steps, False
        if overrides(self.task, "on_validation_model_zero_grad", Task):
            self.task.on_validation_model_zero_grad()
        try:
            self._evaluation.run(before_end=self._count_validation, control=self.control)
        except EvaluationEnded:
            set_rng_state(random_numbers)
            self._leave_before_validation()
        trainer.training, trainer.validating = True, False
        trainer.active_log = log
        self.between_steps = before

    def _leave_before_validation(self) -> NoReturn:
        """Leave as if the validation that is due had not begun: the run that goes on from here begins with it."""
        self.trainer.progress.epochs_done = self.trainer.progress.epoch
        self.leave()

    def _count_validation(self) -> None:
        """What a checkpoint that is saved at the validation's end must hold."""
        self.validations.count()
        self.schedulers.end_validation()

    def _call(self, name: str) -> None:
        for hook in self.hooks.of(name):
            hook(self.trainer, self.task)
