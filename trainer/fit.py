"""One `fit`: what is prepared before the loop, and what the loop asks for between its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor

from ..callbacks.wording import counted
from .agreement import compare, optimizers_of
from .checkpoint import Checkpoint, read_rank_state
from .checkpoint.state import restore
from .control import LEAVE, STOP, WRITTEN, ControlWord
from .data.sampling import check_same_order
from .divergence import SkippedSteps
from .evaluation import VALIDATION, EvaluationEnded, EvaluationLoop
from .fit_loaders import FitLoaders
from .hooks import HookTable, overrides
from .loop import TrainingLoop
from .metrics.log import MetricLog
from .optimization import SchedulerConfig, configure_optimizers
from .plan import make_plan
from .randomness import derived_seed, kept_rng, rng_state, seed_everything, set_rng_state
from .signals import name_of, preempted
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer

_NEVER = float("inf")


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
        self._checkpoint = checkpoint
        self._rank_state = None if checkpoint is None else read_rank_state(checkpoint, trainer.global_rank)
        """What the checkpoint has of this rank alone."""
        self._other_ranks = checkpoint is not None and checkpoint.manifest["world_size"] != trainer.world_size
        if self._rank_state is not None and self._other_ranks:  # the rest is one of as many parts as there were ranks
            self._rank_state = {key: value for key, value in self._rank_state.items() if key in ("rng", "strategy")}
        self.between_steps = True
        """Whether no validation and no end of an epoch is running: a checkpoint of that moment could not be resumed."""
        self.cut_short: dict[str, Any] | None = None
        """Of an epoch that ended before its last batch, what was logged in it: a resumed run ends it once more, whole."""
        config = trainer.config
        self.uneven = self._uneven_policy()
        """What happens when loaders end apart: "stop" or "join"; None: they can't."""
        self.length = self._common_length()
        """Batches of an epoch, on every rank; None where it can't be known."""
        self._max_steps = config.max_steps if config.max_steps >= 0 else _NEVER
        self._validation_interval = self._interval()
        self.next_validation = _NEVER
        """The batch of the epoch behind which a validation is due."""
        self._evaluation: EvaluationLoop | None = None
        if loaders.validation:
            self._evaluation = EvaluationLoop(trainer, task, hooks, VALIDATION, loaders.validation, loaders.transfer)

    def start(self) -> TrainingLoop:
        """Build optimizers, resume, wrap, check the validation; return the loop, ready for its first epoch."""
        trainer, config = self.trainer, self.trainer.config
        self._refuse_what_excludes_manual_optimization()
        self._refuse_overrides_that_would_be_passed_over()
        trainer.plan = make_plan(
            config, self.loaders.training, self.length, self.loaders.validation, trainer.world_size
        )
        trainer.optimizers, trainer.lr_scheduler_configs = configure_optimizers(self.task)
        trainer.strategy.prepare_optimizers(trainer.optimizers, self.task)
        if self._checkpoint is not None:
            restore(trainer, self._checkpoint, training=True, rank_state=self._rank_state)
            self._count_validations_anew(self._checkpoint)
            if trainer.global_step:  # else torch warns of a scheduler that moves before its optimizer has stepped
                for optimizer in trainer.optimizers:
                    optimizer._opt_called = True  # pyright: ignore
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
            self.step_epoch_schedulers()
        self._seed_ranks()
        self._call("on_fit_start")  # from here on the loggers know where they go on
        trainer.log_hyperparameters()
        trainer.signals.control = self.control  # from here on there is somebody who asks
        if self._checkpoint is None:
            self._sanity_check()
        self._restore_loop()
        limit = config.time_limit()
        self.deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        trainer.training, trainer.active_log = True, loop.log
        self._call("on_train_start")
        if not trainer.progress.batch_idx:
            self.take_up()
        if self._checkpoint is not None:  # the run before may have been stopped, and saved when it was
            self.follow(self.control.settle())
        return loop

    def _count_validations_anew(self, checkpoint: Checkpoint) -> None:
        """Where batches are other ones now: the one that comes due by that is not made up for."""
        progress, interval = self.trainer.progress, self._validation_interval
        before = checkpoint.training["progress"].get("batches_since_validation", 0)
        if self._other_ranks and isinstance(interval, int) and before < interval:
            progress.batches_since_validation %= interval

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

    def _refuse_what_excludes_manual_optimization(self) -> None:
        config = self.trainer.config
        if self.task.automatic_optimization:
            return
        if config.accumulate_grad_batches != 1 or config.gradient_clip_val is not None:
            raise ValueError(
                "accumulate_grad_batches and gradient_clip_val work with automatic optimization only: with "
                "automatic_optimization=False, accumulate and clip in training_step (self.clip_gradients)."
            )
        if config.skip_nonfinite is not None:
            raise ValueError(
                "skip_nonfinite with automatic_optimization=False: the task steps its optimizers by itself. Leave it out, and "
                "look at the gradients in training_step."
            )

    def _refuse_overrides_that_would_be_passed_over(self) -> None:
        strategy, automatic = self.trainer.strategy, self.task.automatic_optimization
        if strategy.scaler is not None and (own := self._overridden("optimizer_step", "backward") or not automatic):
            raise ValueError(
                f"precision='16-mixed' with {own if automatic else 'automatic_optimization=False'}: the trainer scales the "
                "loss and decides whether a step is taken, which the task would pass over. Use bf16-mixed, which needs no "
                "scaling."
            )
        own = self._overridden(
            "optimizer_step", "configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward"
        )
        if strategy.optimizer_in_backward and own:
            raise ValueError(
                f"optimizer_in_backward with {type(self.task).__name__}.{own}: when it is called, the parameters are updated "
                "already. Leave one of them out."
            )

    def _overridden(self, *names: str) -> str:
        """The first of these methods that the task has of its own; empty: none."""
        return next((name for name in names if overrides(self.task, name, Task)), "")

    def _seed_ranks(self) -> None:
        """From here on every rank draws its own random numbers, all of them functions of the run's seed."""
        if self.trainer.config.seed is not None or self.trainer.world_size > 1:
            seed_everything(derived_seed(self.trainer.seed, self.trainer.global_rank, "rank"))

    def _restore_loop(self) -> None:
        """Give loop and strategy back what the next step depends on."""
        if self._checkpoint is None:
            return
        if "loop" in self._checkpoint.training:
            self._loop.load_state_dict(self._checkpoint.training["loop"])
        if self._rank_state is None:  # on more ranks than before, the new ones have numbers of their own
            seed_everything(derived_seed(self.trainer.seed, self.trainer.global_rank, "rank", self.trainer.global_step))
        else:
            self.trainer.strategy.load_rank_state_dict(self._rank_state.get("strategy", {}))

    def take_up(self) -> None:
        """In a resumed run, go on with the random numbers, and with what was logged so far in the epoch.

        Behind the hooks that run once more, which may draw and log: `on_train_start`, and inside an epoch
        `on_train_epoch_start`. There, the loader has begun before, which draws, too.
        """
        state, self._rank_state = self._rank_state, None
        if state is None:
            return
        set_rng_state(state["rng"])
        if "metrics" in state:
            self._loop.load_metrics_state_dict(state["metrics"])
        elif self._other_ranks and self.trainer.progress.batch_idx:
            self.trainer.print(
                "on another number of ranks: what this epoch logs as its own covers the batches after the resume only"
            )

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
        self.trainer.write_waiting_saves()

    # --- what the loop asks for ------------------------------------------------------------

    def schedulers(self, interval: str) -> list[SchedulerConfig]:
        """The schedulers that the trainer steps at this interval."""
        if not self.task.automatic_optimization:
            return []
        return [config for config in self.trainer.lr_scheduler_configs if config.interval == interval]

    def step_scheduler(self, config: SchedulerConfig) -> None:
        """Step a scheduler, with the metric it monitors, if that was reduced in this epoch.

        Raises:
            RuntimeError: the metric was not logged, or differs from rank to rank.
        """
        metric = None
        if config.monitor is not None and config.needs_metric:
            metric = self._metric_of(config, config.monitor)
            if metric is None:
                return
        if overrides(self.task, "lr_scheduler_step", Task):
            self.task.lr_scheduler_step(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)  # pyright: ignore[reportArgumentType]

    def step_epoch_schedulers(self) -> None:
        """Step the schedulers whose turn it is at the end of an epoch."""
        progress = self.trainer.progress
        progress.epochs_scheduled = progress.epochs_done
        for config in self.schedulers("epoch"):
            if progress.epochs_done % config.frequency == 0:
                self.step_scheduler(config)

    def _metric_of(self, config: SchedulerConfig, name: str) -> Tensor | None:
        """The metric a scheduler decides by; None: there is no new one, and its step is left out.

        In an epoch without validation the value of an earlier one would count twice.
        """
        trainer = self.trainer
        if config.interval == "epoch":
            if name not in trainer.callback_metrics and trainer.awaits_validation:
                return None
            if trainer.metric_steps.get(name, _NEVER) <= trainer.progress.steps_before_epoch:
                return None
        return trainer.monitored(name, type(config.scheduler).__name__, required=config.strict)

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
        self.length = self._common_length(loader.order_digest() if self.trainer.world_size > 1 else None)
        self._plan_validation(self.length)
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

    def _uneven_policy(self) -> Literal["stop", "join"] | None:
        strategy = self.trainer.strategy
        unsized = strategy.gather_objects(self.loaders.training.length is None, name="which loaders have a length")
        if strategy.world_size == 1 or strategy.uneven_inputs == "error":
            return None
        return strategy.uneven_inputs or ("stop" if any(unsized) else None)

    def _common_length(self, order: str | None = None) -> int | None:
        """Batches of the epoch on every rank: of the one that ends first or last, where they may end apart.

        Args:
            order: `order_digest` of the epoch that begins, which all ranks must share.
        """
        mine = self.loaders.training.length, order
        told = self.trainer.strategy.gather_objects(mine, name="lengths of the training loader")
        lengths, orders = (list(values) for values in zip(*told, strict=True))
        check_same_order(orders, "training")
        known = [length for length in lengths if length is not None]
        if self.uneven is not None:
            return None if len(known) < len(lengths) else max(known) if self.uneven == "join" else min(known)
        if len(set(lengths)) > 1:
            each = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
            raise RuntimeError(
                f"the training loader's length differs ({each} batches), so the longer ranks would wait for the shorter: "
                "expected the same on every rank. Deal the samples evenly, set limit_train_batches="
                f"{min(known)}, or choose DDPStrategy(uneven_inputs='stop') or 'join'."
                if len(known) == len(lengths)
                else f"the training loader has a length on some ranks only ({each}): expected it on all."
            )
        return lengths[0]

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
        self.trainer.publish(logged, log)

    def finish_epoch(self, log: MetricLog, *, whole: bool) -> None:
        """What ends an epoch: validation, its hooks and metrics, schedulers, and those who decide by metrics.

        `whole`: it went to its last batch, so that a resumed run begins the next one.
        """
        trainer, progress = self.trainer, self.trainer.progress
        self.between_steps = False
        if whole:
            progress.epochs_done = progress.epoch + 1
            if self._validation_due_at_end():
                self.validate(log)
        else:
            self.cut_short = self._loop.metrics_state_dict()
        trainer.publish(log.reduce_epoch(with_step=True), log)
        if self.hooks.on_train_epoch_end:  # they may read what is there, and log more
            self._call("on_train_epoch_end")
            trainer.publish(log.reduce_epoch(), log)
        log.close_epoch()
        trainer.active_log = None
        if whole:
            self.step_epoch_schedulers()
        self.between_steps = True
        for hook in self.hooks.monitor_train_epoch_end:
            hook(trainer, self.task)
        trainer.write_waiting_saves()
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

    def _interval(self) -> int | float | None:
        """Batches between validations; None: at the end of an epoch."""
        value, length = self.trainer.config.val_check_interval, self.length
        if value is None or (isinstance(value, float) and value == 1.0):
            return None
        if isinstance(value, int):
            if self.trainer.config.check_val_every_n_epoch is not None and length is not None and value > length:
                raise ValueError(
                    f"val_check_interval={value} is more than the {counted(length, 'batch')} of an epoch: there would be no "
                    "validation. Set check_val_every_n_epoch=None to count across epochs."
                )
            return value
        if length is None:
            raise ValueError(
                f"val_check_interval={value}: the training loader has no length to take a share of; give a number (int)."
            )
        if not int(length * value):
            raise ValueError(
                f"val_check_interval={value} of {counted(length, 'batch')} is none: expected {1 / length:.3g} or more."
            )
        return int(length * value)

    def _plan_validation(self, length: int | None) -> None:
        config, progress, interval = self.trainer.config, self.trainer.progress, self._validation_interval
        every = config.check_val_every_n_epoch
        self.next_validation = _NEVER
        if every is not None and not progress.batch_idx:
            progress.batches_since_validation = 0  # each epoch is counted by itself
        if self._evaluation is None or (every is not None and (progress.epoch + 1) % every):
            return
        if interval is None:
            self.next_validation = _NEVER if length is None else length
            return
        # From where the last one was due, not from here: one that a run was saved in front of is still due.
        last = progress.batch_idx - progress.batches_since_validation
        due = last + interval if every is None else (last // interval + 1) * interval
        self.next_validation = due if progress.batch_idx else max(1, due)

    def _validation_due_at_end(self) -> bool:
        if self._evaluation is None:
            return False
        every = self.trainer.config.check_val_every_n_epoch
        if self._validation_interval is None:
            return every is None or (self.trainer.progress.epoch + 1) % every == 0
        return self.trainer.progress.batch_idx >= self.next_validation

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
        progress = self.trainer.progress
        # What an accumulation window delayed is not owed again: the next one is due where it would have been.
        if isinstance(self._validation_interval, int):
            progress.batches_since_validation %= self._validation_interval
        progress.validations += 1
        self._plan_validation(self.length)
        for config in self.schedulers("validation"):
            if progress.validations % config.frequency == 0:
                self.step_scheduler(config)

    def _call(self, name: str) -> None:
        for hook in self.hooks.of(name):
            hook(self.trainer, self.task)
