"""`Trainer`: fit, validate, test and predict; and the life of a run around them."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.logger import Logger, SilentLogger
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.wording import counted
from ..strategies import Environment, Precision, Strategy
from .callback_list import all_callbacks
from .checkpoint.background import BackgroundWriter, Following
from .checkpoint.resolve import checkpoint_to_resume, read
from .checkpoint.retention import remove_dropped
from .checkpoint.staging import claim_new
from .checkpoint.state import restore, save
from .config import TrainerConfig, check_option_names
from .control import SAVE, STOP, ControlWord
from .data.loaders import LIMITS
from .data.position import Position
from .data.prepared import PreparedLoader
from .data.source import DataSource
from .data_module import DataModule
from .divergence import DivergedError, Snapshot, go_back, take_snapshot
from .evaluation import PREDICTION, TEST, VALIDATION, EvaluationLoop, Stage
from .fit import FitRun
from .fit_loaders import FitLoaders
from .hangs import HangWatch
from .hooks import overrides
from .loop import TrainingLoop
from .metrics.log import Logged, MetricLog
from .misnomers import check_names
from .optimization import SchedulerConfig
from .placement import choose_strategy, place
from .plan import LearningRates, RunPlan, learning_rates
from .progress import Progress
from .randomness import seed_everything
from .results import print_results
from .session import check_initialized, session
from .signals import SignalHandlers
from .strategy_check import check_strategy
from .task import Task


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
    callback_metrics: dict[str, Tensor]
    """The newest values that were logged and reduced, the same on every rank. Reading is never a collective."""
    logged_metrics: dict[str, Tensor]
    """The newest values given to the loggers."""
    progress_bar_metrics: dict[str, float]
    """The newest values logged with `prog_bar=True`."""

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
        environment = Environment.read()
        placement = place(self.config, environment)
        self.processes_to_launch = placement.processes if placement.to_launch else 0
        ranks = environment.world_size if environment.launched else placement.processes
        self.strategy = choose_strategy(strategy if strategy is not None else self.config.strategy, self.config, ranks)
        check_strategy(self.strategy)
        if self.processes_to_launch:  # checked here, and started by the first run
            expected = dataclasses.replace(environment, world_size=ranks, local_world_size=ranks)
            self.strategy.place(expected, placement.device, Precision.parse(self.config.precision))
        self.strategy.place(environment, placement.device, Precision.parse(self.config.precision))
        self.strategy.check_step(
            accumulation=self.config.accumulate_grad_batches,
            clip_limit=self.config.gradient_clip_val,
            skips=self.config.skip_nonfinite is not None,
        )
        self.callbacks = all_callbacks(self.config, callbacks, logger, development=bool(given.fast_dev_run))
        if self.config.seed is not None:
            seed_everything(self.config.seed)

        self.progress = Progress()
        self.datamodule = None
        self.optimizers, self.lr_scheduler_configs = [], []
        self.plan, self.gradient_norm, self.training_data = None, None, None
        self.callback_metrics, self.logged_metrics, self.progress_bar_metrics = {}, {}, {}
        self.seed = self.config.seed or 0
        """The seed all ranks agreed on, at the start of a run."""
        self.control = ControlWord(self.strategy)
        self.signals = SignalHandlers(enabled=False, rank=self.strategy.rank)
        """What the signals of the running stage come to."""
        self.checkpoint_writer = BackgroundWriter(self.strategy.say)
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
        self._unshared: set[str] = set()
        self._published: dict[bool, set[str]] = {True: set(), False: set()}  # by evaluation or training, in this fit
        self.metric_steps: dict[str, int] = {}
        """The optimizer step at which each of `callback_metrics` was reduced."""
        self.training_loop: TrainingLoop | None = None
        """Of the last fit."""
        self.waiting_saves: list[Path] = []
        """Checkpoints that were asked for inside a step, a validation or the end of an epoch: they are written behind it."""
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
        self.seconds_saving = 0.0
        """How long `save_checkpoint` has kept this process, in all."""
        self.hang_watch: HangWatch | None = None
        """Says, in a run on several ranks, if some wait for one that does not come; its `hang` is what is wrong now."""
        self.resumed_from: Path | None = None
        """The checkpoint this run goes on from; it is never removed."""

    # --- the four things it does -----------------------------------------------------------

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
        _check_task(model, "fit", ("training_step", "configure_optimizers"))
        if (plan := os.environ.get("SAMESTEP_VERIFY_RESUME")) is not None:
            from .resume_check.probe import join

            ckpt_path = join(self, plan, ckpt_path)
        self.plan = None  # that of the fit before
        with session(self, "fit", model, datamodule) as hooks:
            self._stop_asked, self.stop_reason = False, None
            self._published = {True: set(), False: set()}
            self.training_loop, self.waiting_saves = None, []
            self.control = ControlWord(self.strategy)
            checkpoint = checkpoint_to_resume(self, ckpt_path)
            self.fitting = True
            self.resumed_from = None if checkpoint is None else checkpoint.path
            loaders = FitLoaders(self, train_dataloaders, val_dataloaders, checkpoint)
            self._has_validation = bool(loaders.validation)
            if self._has_validation:
                _check_task(model, "validation inside fit", ("validation_step",))
            run = FitRun(self, model, hooks, loaders, checkpoint)
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
        return self._evaluate("validate", VALIDATION, model, dataloaders, ckpt_path, datamodule, verbose)[0]

    def test(
        self,
        model: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test loaders; otherwise as `validate`."""
        return self._evaluate("test", TEST, model, dataloaders, ckpt_path, datamodule, verbose)[0]

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
        kept = self._evaluate("predict", PREDICTION, model, dataloaders, ckpt_path, datamodule, False, keep, gather)[1]
        if not keep:
            return None
        return kept[0] if len(kept) == 1 else kept

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
        loop = self.training_loop
        if self.fitting and not weights_only and loop is not None and not loop.is_between_steps:
            self.waiting_saves.append(Path(filepath))
        else:
            with self._timed_save():
                save(self, Path(filepath), weights_only=weights_only)

    def write_waiting_saves(self) -> None:
        """Write the checkpoints that were asked for where none could be taken. Called by the loop, on all ranks."""
        waiting, self.waiting_saves = self.waiting_saves, []
        for path in dict.fromkeys(waiting):
            with self._timed_save():
                save(self, path)

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
        with self._timed_save():
            save(self, Path(filepath), weights_only=weights_only, following=following, background=background)

    @contextmanager
    def _timed_save(self) -> Generator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds_saving += time.monotonic() - begun

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written in the background. All ranks must call it, at the same place.

        Raises:
            CheckpointError: it could not be written.
        """
        self.checkpoint_writer.settle()

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

    def take_snapshot(self) -> Snapshot:
        """Copy the state of training, without the position in the data, to the CPU's memory. All ranks must."""
        return take_snapshot(self)

    def go_back(self, snapshot: Snapshot) -> None:
        """Bring training back to a snapshot, and go on with the samples that come next. All ranks must, at the same step."""
        go_back(self, snapshot)

    def diverge(self, reason: str) -> NoReturn:
        """End the run as diverged, on all ranks at the same step.

        Raises:
            DivergedError: with the reason.
        """
        raise DivergedError(reason)

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

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop training: within about a second, at the same step. Any rank may ask."""
        self.stop_reason = self.stop_reason or reason
        self.should_stop = True

    # --- where it stands -------------------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """Where the fit stands in its training data; None before the first."""
        if self.training_data is None:
            return None
        batches, accumulation = self.progress.batch_idx, self.config.accumulate_grad_batches
        return Position.of(self.training_data, self.world_size, accumulation, batches)

    @property
    def should_stop(self) -> bool:
        """Whether this rank was asked to stop. Setting it is `stop` without a reason."""
        return self._stop_asked

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stop_asked = value
        if value:
            self.control.raise_flag(STOP)

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.progress.global_step

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
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.strategy.rank == 0

    @property
    def model(self) -> Task:
        """The task of the run."""
        return self.task

    @property
    def lightning_module(self) -> Task:
        """The task of the run, as Lightning's callbacks call it."""
        return self.task

    @property
    def num_devices(self) -> int:
        """Processes, and so devices, on this host."""
        return self.strategy.environment.local_world_size

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test is running."""
        return self.validating or self.testing or self.sanity_checking

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
    def epoch_is_over(self) -> bool:
        """Whether all batches of the running epoch are done, and only its end is left."""
        return self.progress.epochs_done > self.progress.epoch

    @property
    def awaits_validation(self) -> bool:
        """Whether a validation belongs to this fit, and none has been yet."""
        return self.fitting and self._has_validation and self.progress.validations == 0

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

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def monitored(self, name: str, who: str, *, required: bool = True) -> Tensor | None:
        """The newest value of a metric that is to be decided by.

        Args:
            name: as it was logged.
            who: wants it, for the message.
            required: raise where it is not there; False: return None.

        Raises:
            RuntimeError: it was not logged, or differs from rank to rank, so that ranks would decide differently.
        """
        if name in self.callback_metrics:
            return self.callback_metrics[name]
        if name in self._unshared:
            raise RuntimeError(
                f"{who} monitors {name!r}, which was logged with sync_dist=False or rank_zero_only=True: it differs from "
                "rank to rank, and so would the decision. Log it with sync_dist=True."
            )
        if not required:
            return None
        raise RuntimeError(
            f"{who} monitors {name!r}, which was not logged: expected one of "
            f"{', '.join(map(repr, self.callback_metrics)) or '(nothing was logged)'}."
        )

    def publish(self, logged: Logged, log: MetricLog) -> None:
        """Hand reduced values to all who show, keep or decide by them."""
        if self.sanity_checking:
            return
        if self.fitting:
            self._refuse_shared_names(logged, log)
        self._unshared.update(log.unshared_names())
        tensors = _tensors(logged.for_callbacks)
        self.callback_metrics |= tensors
        self.metric_steps |= dict.fromkeys(logged.for_callbacks, self.global_step)
        self.progress_bar_metrics |= logged.for_progress_bar
        if not logged.for_logger:
            return
        self.logged_metrics |= tensors if logged.for_logger == logged.for_callbacks else _tensors(logged.for_logger)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(logged.for_logger, step=self.global_step)

    def _refuse_shared_names(self, logged: Logged, log: MetricLog) -> None:
        """Refuse a name of both training and validation: a monitor would follow now the one, now the other.

        Raises:
            ValueError: names it.
        """
        names = logged.for_callbacks.keys() | logged.for_logger.keys() | logged.for_progress_bar.keys()
        if both := names & self._published[not log.evaluation]:
            name = min(both)
            raise ValueError(
                f"self.log({name!r}) in training and in validation: one name would stand for two values, and a monitor for "
                f"now the one, now the other. Expected two names, such as 'train/{name}' and 'val/{name}'."
            )
        self._published[log.evaluation] |= names

    def log_hyperparameters(self) -> None:
        """Hand the hyperparameters of data module and task to the loggers, on rank 0."""
        if not self.is_global_zero:
            return
        hyperparameters: dict[str, Any] = {}
        for holder in (self.datamodule, self.task):
            if holder is not None and holder.logs_hyperparameters:
                hyperparameters |= holder.hparams
        if hyperparameters:
            for logger in self.loggers:
                logger.log_hyperparams(hyperparameters)

    # --- evaluation --------------------------------------------------------

    def _evaluate(
        self,
        stage_name: str,
        stage: Stage,
        task: Task | None,
        dataloaders: Any,
        ckpt_path: str | os.PathLike[str] | None,
        datamodule: DataModule | None,
        verbose: bool,
        keep: bool = False,
        gather: bool = False,
    ) -> tuple[list[dict[str, float]], list[list[Any]]]:
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        if task is None and ckpt_path is None and self.checkpoint_callback and self.checkpoint_callback.best_model_path:
            ckpt_path = "best"
            self.print(
                f"{stage_name} without a task takes the best checkpoint: {self.checkpoint_callback.best_model_path}"
            )
        task = task if task is not None else getattr(self, "task", None)
        if task is None:
            raise ValueError(
                f"{stage_name} needs a task: trainer.{stage_name}(task, …), since none was trained before."
            )
        predicts_by_forward = stage is PREDICTION and overrides(task, "forward", Task)
        _check_task(task, stage_name, () if predicts_by_forward else (stage.step,))
        if ckpt_path == "auto":
            raise ValueError(f"ckpt_path='auto' is for fit; {stage_name} takes a path, 'best' or 'last'.")
        with session(self, stage_name, task, datamodule or self.datamodule) as hooks:
            if ckpt_path is not None:
                restore(self, read(self, ckpt_path), training=False)
            check_initialized(task)
            # Without DDP's constructor nobody has made the ranks' weights equal.
            self.strategy.broadcast_module(task)
            source = DataSource(self)
            loaders = source.evaluation(stage.data, stage.loaders, dataloaders)
            if not loaders:
                raise ValueError(
                    f"{stage_name} has no loader: give one, or write {stage.loaders} in the task or a DataModule; and "
                    f"{LIMITS[stage.data]} must be above 0."
                )
            if stage is PREDICTION:
                self.predict_dataloaders = [prepared.loader for prepared in loaders]
            flag = {"validate": "validating", "test": "testing", "predict": "predicting"}[stage_name]
            setattr(self, flag, True)
            loop = EvaluationLoop(self, task, hooks, stage, loaders, source.transfer())
            for index, loader in enumerate(loaders):
                for remark in loader.remarks():
                    self.print(f"{stage_name}{f', loader {index}' if len(loaders) > 1 else ''}: {remark}")
            logged, kept = loop.run(keep=keep, gather=gather)
            setattr(self, flag, False)
        results = _by_loader(logged, len(loaders))
        if verbose and self.is_global_zero:
            print_results(results, stage_name)
        return results, kept


def _check_task(task: Task, purpose: str, needed: Sequence[str]) -> None:
    if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(getattr(task, "_orig_mod", None), Task):
            raise TypeError(
                f"expected a Task, received a compiled one: give the plain task to {purpose}, and let the strategy compile "
                "its step, Trainer(strategy=DDPStrategy(compile='before_ddp')), so that it is split at DDP's buckets."
            )
        raise TypeError(f"expected a Task, received {type(task).__name__}: subclass samestep.trainer.Task.")
    if "_modules" not in vars(task):
        raise TypeError(f"{type(task).__name__}.__init__ has not called super().__init__(): expected it first.")
    for name in needed:
        if not overrides(task, name, Task):
            check_names(type(task), Task)  # it may be there under another name
            raise TypeError(
                f"{type(task).__name__} has no {name}, which {purpose} needs: expected a method of that name."
            )


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _by_loader(logged: Logged, loaders: int) -> list[dict[str, float]]:
    values = {**logged.for_callbacks, **logged.for_logger}
    if loaders == 1:
        return [values]
    marks = [f"/dataloader_idx_{index}" for index in range(loaders)]
    common = {name: value for name, value in values.items() if not name.endswith(tuple(marks))}
    return [{**common, **{name: value for name, value in values.items() if name.endswith(mark)}} for mark in marks]
