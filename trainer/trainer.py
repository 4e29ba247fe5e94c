"""`Trainer`: its options, the four things it does, and what a program or a callback may ask of it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.logger import Logger, SilentLogger
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.wording import counted
from ..strategies import Strategy
from .callback_list import all_callbacks
from .checkpoint.background import BackgroundWriter, Following
from .checkpoint.resolve import checkpoint_to_resume
from .checkpoint.retention import remove_dropped
from .checkpoint.saves import Saves
from .checkpoint.staging import claim_new
from .config import TrainerConfig, check_option_names
from .control import SAVE, STOP, ControlWord
from .data.position import Position
from .data.prepared import PreparedLoader
from .data_module import DataModule
from .divergence import DivergedError, Snapshot, go_back, take_snapshot
from .evaluation import PREDICTION, TEST, VALIDATION
from .evaluation_run import evaluate
from .fit import FitRun
from .fit_loaders import FitLoaders
from .hangs import HangWatch
from .hooks import overrides
from .loop import TrainingLoop
from .metrics.log import MetricLog
from .metrics.published import PublishedMetrics
from .optimization import SchedulerConfig
from .placement import placed_strategy
from .plan import LearningRates, RunPlan, learning_rates
from .progress import Progress
from .randomness import seed_everything
from .session import session
from .signals import SignalHandlers
from .task import Task
from .task_check import check_task


class Trainer:
    """Trains, validates, tests and predicts with a `Task`.

    Args:
        config: the options as one object; default `TrainerConfig()`.
        strategy: a name or a `Strategy` object; default: what `config` says.
        callbacks: one, or a list. Added where none of the kind is given, and the options ask for it: a progress
            bar, a model summary, a logger, a ModelCheckpoint.
        logger: True, False, a `Logger`, or a list of them; default: what `config` says.
        options: fields of `TrainerConfig`, which replace those of `config`.

    Raises:
        TypeError, ValueError: an option, callback or hook is wrong. Nothing has been started then.
    """

    config: TrainerConfig
    """All options, resolved; read-only."""
    strategy: Strategy
    """How the processes cooperate."""
    callbacks: list[Callback]
    """In the order in which their hooks run; loggers and progress bars are among them."""
    progress: Progress
    """The counters of the run."""
    task: Task
    """What is being trained or evaluated; set by a run."""
    datamodule: DataModule | None
    """The data module of the run."""
    optimizers: list[Optimizer]
    """Of `configure_optimizers`."""
    lr_scheduler_configs: list[SchedulerConfig]
    """Of `configure_optimizers`."""
    plan: RunPlan | None
    """What the fit is going to do, once its loaders are known."""
    training_data: PreparedLoader | None
    """The training loader with this rank's samples, once there was a fit."""
    gradient_norm: Tensor | None
    """Of the last step, before clipping; on the device. None without clipping by norm."""

    def __init__(
        self,
        config: TrainerConfig | None = None,
        *,
        strategy: Strategy | str | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: Logger | Sequence[Logger] | bool | None = None,
        **options: Any,
    ) -> None:
        check_option_names(list(options))
        if isinstance(options.get("default_root_dir"), os.PathLike):
            options["default_root_dir"] = os.fspath(options["default_root_dir"])
        if isinstance(logger, bool):
            options["logger"] = logger
        if isinstance(strategy, str):
            options["strategy"] = strategy
        # None stands for the default, but here, where it says something.
        options = {
            name: value for name, value in options.items() if value is not None or name == "check_val_every_n_epoch"
        }
        given = dataclasses.replace(config or TrainerConfig(), **options)
        self.config = given.resolved()
        self.strategy, self.processes_to_launch = placed_strategy(
            strategy if strategy is not None else self.config.strategy, self.config
        )
        self.callbacks = all_callbacks(self.config, callbacks, logger, development=bool(given.fast_dev_run))
        if self.config.seed is not None:
            seed_everything(self.config.seed)

        self.progress = Progress()
        self.datamodule = None
        self.optimizers, self.lr_scheduler_configs = [], []
        self.plan, self.gradient_norm, self.training_data = None, None, None
        self.seed = self.config.seed or 0
        """The seed all ranks agreed on, at the start of a run."""
        self.control = ControlWord(self.strategy)
        self.signals = SignalHandlers(enabled=False, rank=self.strategy.rank)
        """What the signals of the running stage come to."""
        self.saves = Saves(self)
        """What writes checkpoints."""
        self.metrics = PublishedMetrics(self)
        """What was logged, reduced."""
        self.active_log: MetricLog | None = None
        self.stop_reason: str | None = None
        """What `stop` was told on this rank; after fit, on the first rank that asked."""
        self.training = self.validating = self.testing = self.predicting = self.sanity_checking = False
        self.train_dataloader: Any = None
        """What gives this rank's training batches."""
        self.val_dataloaders: list[Any] = []
        """What gives this rank's validation batches."""
        self.predict_dataloaders: list[Any] = []
        """What gives this rank's prediction batches."""
        self._stop_asked = self._has_validation = False
        root = self.config.default_root_dir
        self._run_folder = None if root is None else Path(root)
        self.training_loop: TrainingLoop | None = None
        """Of the last fit."""
        self.running = ""
        """The stage that is running: `fit`, `validate`, `test` or `predict`; empty between runs."""
        self.evaluation_batches: float = 0
        """Batches of this rank in the evaluation that runs, or ran last, over all its loaders; inf: not known."""
        self.batch_indices: list[Any] | None = None
        """The samples of the running prediction batch, by their places in the dataset, as the loader's sampler gave them;
        None where it has none (an iterable, a stream, `in_order=False`), and outside of predict."""
        self.fitting = False
        """Whether fit is running, with the validations in it."""
        self.is_last_batch = False
        """Whether the running micro-batch, or the one just done, is the last of its epoch, where that can be known."""
        self.hang_watch: HangWatch | None = None
        """Says, in a run on several ranks, if some wait for one that does not come; its `hang` is what is wrong now."""
        self.resumed_from: Path | None = None
        """The checkpoint this run goes on from; it is never removed."""

    # --- the four things it does -------------------------------------------------------------

    def fit(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train, with validation where there is any.

        A second `fit` of the same Trainer goes on counting epochs and steps: with `max_epochs` reached it does
        nothing. Under torchrun, and with `devices` above 1, the code after `fit` runs on every rank.

        Args:
            model: the task.
            train_dataloaders: the training loader, or a DataModule. Default: the data module's or the task's.
            val_dataloaders: the validation loader, or a list of them.
            datamodule: gives what is not given above.
            ckpt_path: resume from this checkpoint: a path, "best", "last", or "auto" (the intact one that was made
                last in the folders of the run's ModelCheckpoints; without any, start anew). A line says which.

        Raises:
            TypeError, ValueError: task, loaders, optimizers or options don't fit; before anything is trained.
            CheckpointError: the checkpoint is not there, damaged, or does not fit.
            Preempted, Interrupted: a signal ended the run, after all ranks had saved. They end the program, too.
            PeerError: another rank ended the run.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        check_task(model, "fit", ("training_step", "configure_optimizers"))
        if (plan := os.environ.get("SAMESTEP_VERIFY_RESUME")) is not None:
            from .resume_check.probe import join

            ckpt_path = join(self, plan, ckpt_path)
        self.plan = None  # that of the fit before
        with session(self, "fit", model, datamodule) as hooks:
            self._stop_asked, self.stop_reason = False, None
            self.metrics.begin_fit()
            self.training_loop, self.saves.waiting = None, []
            self.control = ControlWord(self.strategy)
            checkpoint = checkpoint_to_resume(self, ckpt_path)
            self.fitting = True
            self.resumed_from = None if checkpoint is None else checkpoint.path
            loaders = FitLoaders(self, train_dataloaders, val_dataloaders, checkpoint)
            self._has_validation = bool(loaders.validation)
            if self._has_validation:
                check_task(model, "validation inside fit", ("validation_step",))
            run = FitRun(self, model, hooks, loaders, checkpoint)
            del checkpoint  # as large as the model with its optimizers: the run lets it go when it has taken it over
            with run.cleanup:
                loop = run.start()
                if not run.has_next_epoch():
                    self.print(
                        f"nothing to train: {counted(self.current_epoch, 'epoch')} and {counted(self.global_step, 'step')} "
                        "are done already"
                    )
                while run.has_next_epoch():
                    loop.train_epoch()
                run.finish()

    def validate(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation loaders, every sample once over all ranks.

        Args:
            model: the task; default: that of the last run, with the weights of its best checkpoint.
            dataloaders: a loader, a list of them, or a DataModule.
            ckpt_path: load these weights first: a path, "best" or "last".
            verbose: print the metrics.
            datamodule: gives the loaders.

        Returns:
            For each loader, its metrics by name.
        """
        return evaluate(self, VALIDATION, model, dataloaders, ckpt_path, datamodule, verbose=verbose)[0]

    def test(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test loaders; otherwise as `validate`."""
        return evaluate(self, TEST, model, dataloaders, ckpt_path, datamodule, verbose=verbose)[0]

    def predict(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        gather: bool = True,
    ) -> list[Any] | None:
        """Run `predict_step` over the prediction loaders, every sample once over all ranks, in the order of the dataset.

        Args:
            model: the task; default: that of the last run, with the weights of its best checkpoint.
            dataloaders: a loader, a list of them, or a DataModule. A shuffle is not followed; a sampler's order is.
            datamodule: gives the loaders.
            return_predictions: False: keep nothing, for predictions that a callback writes.
            ckpt_path: load these weights first: a path, "best" or "last".
            gather: on several ranks, return the same list of batches that one rank would return, on each of them. What
                `predict_step` returns must then have an item for each sample: tensors with the batch as their first
                dimension, lists, or dicts and tuples of those. False: this rank's batches, whatever they are.

        Returns:
            What `predict_step` returned for each batch, on the CPU; with several loaders a list for each. None with
            `return_predictions=False`.

        Raises:
            TypeError, ValueError: what `predict_step` returns can't be gathered, or the trainer does not deal the samples.
        """
        keep = return_predictions is not False
        kept = evaluate(self, PREDICTION, model, dataloaders, ckpt_path, datamodule, keep=keep, gather=gather)[1]
        if not keep:
            return None
        return kept[0] if len(kept) == 1 else kept

    # --- checkpoints -------------------------------------------------------------------------

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Write a checkpoint into the folder `filepath`.

        Asked for inside a step, a validation, or the end of an epoch, it is written when that is over: a run can't go on
        from half of it. With `weights_only` it is written at once.

        All ranks must call it, at the same place, as each writes its share: never under `if trainer.is_global_zero:`.
        There, ranks that go on to another collective of the trainer are told so at once; one that goes on to the next
        backward waits for this one until the strategy's timeout (10 minutes), which then names the collective.

        Raises:
            CheckpointError: no run has begun, or it could not be written.
            RuntimeError: another rank is at another place.
        """
        self.saves.write(Path(filepath), weights_only=weights_only)

    def start_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        *,
        committed: Callable[[], None],
        settled: Callable[[], None],
        retire: Callable[[], None],
        background: bool = True,
    ) -> None:
        """As `save_checkpoint`, but come back as soon as the state is copied: a thread writes it while training goes on.

        One is written at a time: the next one, of either kind, waits for it. Where the strategy has no collectives for
        the thread, it is written before this returns.

        Args:
            filepath: the folder.
            weights_only: leave out what a resume needs.
            committed: called on rank 0, in the thread, when it is on the disk.
            settled: called on all ranks in the main thread, at the same step, when all know that it is.
            retire: called on all ranks, in the thread, after that: to remove what it replaces.
            background: False: write it before this returns.

        Raises:
            CheckpointError: no run has begun, or the checkpoint before could not be written. That this one could not is
                raised later, on all ranks at the same step; at the latest before fit returns.
        """
        following = Following(committed, settled, retire)
        self.saves.start(Path(filepath), following, weights_only=weights_only, background=background)

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written in the background. All ranks must call it, at the same place.

        Raises:
            CheckpointError: it could not be written.
        """
        self.saves.writer.settle()

    def remove_checkpoints(self, dropped: Sequence[str], staying: Sequence[str], monitor: str | None) -> None:
        """Delete checkpoints that are kept no more. For rank 0 to call.

        Left are the one that this run was resumed from and, where nothing in `staying` is finite, the newest that is:
        finite are weights without inf and NaN, with such a value of the metric `monitor`.
        """
        remove_dropped(dropped, staying, monitor, self.resumed_from)

    def claim_checkpoint(self, filepath: str | os.PathLike[str]) -> bool:
        """Take a name for the next `save_checkpoint`; False: it is taken. For rank 0 to call."""
        return claim_new(Path(filepath))

    def request_timed_save(self) -> None:
        """Ask all ranks for a checkpoint, at the same step, within about a second."""
        self.control.raise_flag(SAVE)

    @property
    def timed_save_agreed(self) -> bool:
        """Whether all ranks agreed, at the end of the last step, that a checkpoint is due."""
        return bool(self.control.agreed & SAVE)

    @property
    def checkpoint_writer(self) -> BackgroundWriter:
        """What writes checkpoints while training goes on; `waits` and `waited` say how often, and how long, one stood in line."""
        return self.saves.writer

    @property
    def seconds_saving(self) -> float:
        """How long checkpoints have kept this process, in all."""
        return self.saves.seconds

    # --- to stop, or to go back --------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop training: within about a second, at the same step. Any rank may ask."""
        self.stop_reason = self.stop_reason or reason
        self.should_stop = True

    @property
    def should_stop(self) -> bool:
        """Whether this rank was asked to stop. Setting it is `stop` without a reason."""
        return self._stop_asked

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stop_asked = value
        if value:
            self.control.raise_flag(STOP)

    def diverge(self, reason: str) -> NoReturn:
        """End the run as diverged, on all ranks at the same step.

        Raises:
            DivergedError: with the reason.
        """
        raise DivergedError(reason)

    def take_snapshot(self) -> Snapshot:
        """Copy the state of training, without the position in the data, to the CPU's memory. All ranks must."""
        return take_snapshot(self)

    def go_back(self, snapshot: Snapshot) -> None:
        """Bring training back to a snapshot, and go on with the samples that come next. All ranks must, at the same step."""
        go_back(self, snapshot)

    # --- where it stands ---------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.progress.global_step

    @property
    def position(self) -> Position | None:
        """Where the fit stands in its training data; None before the first."""
        if self.training_data is None:
            return None
        batches, accumulation = self.progress.batch_idx, self.config.accumulate_grad_batches
        return Position.of(self.training_data, self.world_size, accumulation, batches)

    @property
    def epoch_is_over(self) -> bool:
        """Whether all batches of the running epoch are done, and only its end is left."""
        return self.progress.epochs_done > self.progress.epoch

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test is running."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def awaits_validation(self) -> bool:
        """Whether a validation belongs to this fit, and none has been yet."""
        return self.fitting and self._has_validation and self.progress.validations == 0

    # --- what it is going to do --------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """As in `config`."""
        return self.config.max_epochs

    @property
    def max_steps(self) -> int:
        """As in `config`."""
        return self.config.max_steps

    @property
    def num_training_batches(self) -> float:
        """Micro-batches of this rank in an epoch; inf where it is not known."""
        known = None if self.plan is None else self.plan.batches_per_epoch
        return float("inf") if known is None else known

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for schedulers that need to know: an int; inf without end.

        Worked out from the loaders' lengths: nothing is read or drawn. It counts all epochs, also those that a resumed
        run has behind it. Fewer steps are taken if the run is stopped, or the scaler skips some.

        Raises:
            RuntimeError: no fit has begun, or a loader without a length leaves it open.
        """
        plan = self._known_plan("estimated_stepping_batches")
        if plan.batches_per_epoch is None and math.isinf(plan.total_steps) and not math.isinf(plan.epochs):
            raise RuntimeError(
                "estimated_stepping_batches is not known: the training loader has no length. Set max_steps, or "
                "limit_train_batches to a number that every rank can give; or give the loader a __len__."
            )
        return plan.total_steps

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step: micro-batch × accumulated micro-batches × ranks; from `configure_optimizers` on.

        Raises:
            RuntimeError: no fit has begun, or the training loader does not tell its batch size.
        """
        size = self._known_plan("global_batch_size").global_batch
        if size is None:
            raise RuntimeError(
                "global_batch_size is not known: the training loader has no batch_size, nor has its batch_sampler. "
                "Expected one of them, or multiply your own by trainer.world_size and accumulate_grad_batches."
            )
        return size

    def _known_plan(self, what: str) -> RunPlan:
        if self.plan is None:
            raise RuntimeError(f"{what} is known inside fit only, from configure_optimizers on.")
        return self.plan

    def learning_rates(self) -> LearningRates:
        """The learning rate now, at its highest from here on, and in the last step of the plan.

        Raises:
            RuntimeError: no fit has begun.
        """
        if self.plan is None:
            raise RuntimeError("learning_rates are known inside fit only, from on_fit_start on.")
        if not self.task.automatic_optimization or overrides(self.task, "lr_scheduler_step", Task):
            # The task steps its schedulers as it likes.
            return LearningRates(float(self.optimizers[0].param_groups[0]["lr"]))
        return learning_rates(self.optimizers[0], self.lr_scheduler_configs, self.plan, self.global_step)

    # --- what was logged ---------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest values that were logged and reduced, the same on every rank. Reading is never a collective."""
        return self.metrics.for_callbacks

    @property
    def metric_steps(self) -> dict[str, int]:
        """The optimizer step at which each of `callback_metrics` was reduced."""
        return self.metrics.steps

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest values given to the loggers."""
        return self.metrics.for_loggers

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest values logged with `prog_bar=True`."""
        return self.metrics.for_progress_bar

    def monitored(self, name: str, who: str, *, required: bool = True) -> Tensor | None:
        """The newest value of a metric that is to be decided by; arguments and errors as of `PublishedMetrics.monitored`."""
        return self.metrics.monitored(name, who, required=required)

    # --- its parts ---------------------------------------------------------------------------

    @property
    def model(self) -> Task:
        """The task of the run."""
        return self.task

    @property
    def lightning_module(self) -> Task:
        """The task of the run, as Lightning's callbacks call it."""
        return self.task

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return [callback for callback in self.callbacks if isinstance(callback, Logger)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All ModelCheckpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping."""
        return next((callback for callback in self.callbacks if isinstance(callback, EarlyStopping)), None)

    # --- its processes -----------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return self.strategy.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    @property
    def num_devices(self) -> int:
        """Processes, and so devices, on this host."""
        return self.strategy.environment.local_world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.strategy.rank == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    # --- where its output goes ---------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        """Folder of the run's output."""
        return str(self.run_folder)

    @property
    def log_dir(self) -> str:
        """Folder of the run's output."""
        return str(self.run_folder)

    @property
    def writes(self) -> bool:
        """Whether anything will be written into the run's folder."""
        return any(isinstance(c, (Logger, ModelCheckpoint)) and not isinstance(c, SilentLogger) for c in self.callbacks)

    @property
    def has_run_folder(self) -> bool:
        """Whether `run_folder` is decided."""
        return self._run_folder is not None

    @property
    def run_folder(self) -> Path:
        """Folder of the run's output, the same on every rank. It is made by the first that writes into it.

        Raises:
            RuntimeError: no run has started, and no `default_root_dir` was given.
        """
        if self._run_folder is None:
            raise RuntimeError("the run's folder is decided when a run starts, unless default_root_dir is given.")
        return self._run_folder

    @run_folder.setter
    def run_folder(self, folder: Path) -> None:
        self._run_folder = folder
