"""`Trainer`: fit, validate, test and predict; and the life of a run around them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.logger import Logger
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.model_summary import ModelSummary
from ..callbacks.progress_bar import ProgressBar
from ..callbacks.step_panel import StepPanel
from ..callbacks.tensorboard import TensorBoardLogger
from ..strategies import Environment, Precision, Strategy
from ..strategies.launch import relaunch
from .checkpoint import Checkpoint, CheckpointError, newest_intact, read_checkpoint, remove_checkpoint
from .checkpoint.state import restore, save
from .config import TrainerConfig, check_option_names
from .control import SAVE, STOP, ControlWord
from .data.loaders import LIMITS, Dealing, PreparedLoader, prepare_loader
from .data.transfer import cast_floats
from .data_module import DataModule
from .evaluation import PREDICTION, TEST, VALIDATION, EvaluationLoop, Stage, Transfer
from .fit import FitRun
from .hooks import HookTable, check_hooks, overrides
from .metric_log import Logged, MetricLog
from .optimization import SchedulerConfig
from .placement import choose_strategy, place
from .plan import LearningRates, RunPlan, learning_rates
from .progress import Progress
from .randomness import seed_everything
from .results import print_results
from .settings import torch_settings
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
        given = dataclasses.replace(config or TrainerConfig(), **options)
        self.config = given.resolved()
        environment = Environment.read()
        placement = place(self.config, environment)
        self._to_launch = placement.processes if placement.to_launch else 0
        ranks = environment.world_size if environment.launched else placement.processes
        self.strategy = choose_strategy(strategy if strategy is not None else self.config.strategy, self.config, ranks)
        if self._to_launch:  # checked here, and started by the first run
            expected = dataclasses.replace(environment, world_size=ranks, local_world_size=ranks)
            self.strategy.place(expected, placement.device, Precision.parse(self.config.precision))
        self.strategy.place(environment, placement.device, Precision.parse(self.config.precision))
        self.callbacks = _all_callbacks(self.config, callbacks, logger, development=bool(given.fast_dev_run))
        for callback in self.callbacks:
            check_hooks(callback, Callback)
        if self.config.seed is not None:
            seed_everything(self.config.seed)

        self.progress = Progress()
        self.datamodule = None
        self.optimizers, self.lr_scheduler_configs = [], []
        self.plan, self.gradient_norm = None, None
        self.callback_metrics, self.logged_metrics, self.progress_bar_metrics = {}, {}, {}
        self.seed = self.config.seed or 0
        """The seed all ranks agreed on, at the start of a run."""
        self.control = ControlWord(self.strategy)
        self.active_log: MetricLog | None = None
        self.stop_reason: str | None = None
        """What `stop` was told, on this rank."""
        self.training = self.validating = self.testing = self.predicting = self.sanity_checking = False
        self._stop_asked = self._has_validation = False
        self._run_folder: Path | None = None
        self._unshared: set[str] = set()
        self.metric_steps: dict[str, int] = {}
        """The optimizer step at which each of `callback_metrics` was reduced."""
        self.fitting = False
        """Whether fit is running, with the validations in it."""
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
            ckpt_path: resume from this checkpoint: a path, "best", "last", or "auto" (the newest intact one in
                the folders of the run's ModelCheckpoints; without any, start anew).

        Raises:
            TypeError, ValueError: task, loaders, optimizers or options don't fit; before anything is trained.
            CheckpointError: the checkpoint is not there, damaged, or does not fit.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        _check_task(model, "fit", ("training_step", "configure_optimizers"))
        with self._session("fit", model, datamodule) as hooks:
            self._stop_asked, self.stop_reason = False, None
            self.control = ControlWord(self.strategy)
            checkpoint = self._checkpoint_to_resume(ckpt_path)
            train_loader = self._train_loader(train_dataloaders)
            val_loaders = self._loaders(VALIDATION, val_dataloaders, train_dataloaders)
            if val_loaders:
                _check_task(model, "validation inside fit", ("validation_step",))
            self._log_hyperparameters()
            self._has_validation, self.fitting = bool(val_loaders), True
            self.resumed_from = None if checkpoint is None else checkpoint.path
            run = FitRun(self, model, hooks, train_loader, val_loaders, self._transfer(), checkpoint)
            with run.cleanup:
                loop = run.start()
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
            model: the task; default: that of the last run.
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
    ) -> list[Any] | None:
        """Run `predict_step` over the prediction loaders.

        Returns:
            What `predict_step` returned for each batch of *this rank*, on the CPU; with several loaders a list
            for each. None with `return_predictions=False`.
        """
        keep = return_predictions is not False
        kept = self._evaluate("predict", PREDICTION, model, dataloaders, ckpt_path, datamodule, False, keep)[1]
        if not keep:
            return None
        return kept[0] if len(kept) == 1 else kept

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Write a checkpoint into the folder `filepath`. All ranks must call it.

        Raises:
            CheckpointError: it could not be written.
        """
        save(self, Path(filepath), weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, unless it is the one this run was resumed from. For rank 0 to call."""
        if self.resumed_from is None or Path(filepath).resolve() != self.resumed_from.resolve():
            remove_checkpoint(Path(filepath))

    def request_timed_save(self) -> None:
        """Ask all ranks for a checkpoint, at the same step, within about a second."""
        self.control.raise_flag(SAVE)

    @property
    def timed_save_agreed(self) -> bool:
        """Whether all ranks agreed, at the end of the last step, that a checkpoint is due."""
        return bool(self.control.agreed & SAVE)

    def learning_rates(self) -> LearningRates:
        """The learning rate now, at its highest, and in the last step of the plan."""
        assert self.plan is not None
        return learning_rates(self.optimizers[0], self.lr_scheduler_configs, self.plan)

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop training: within about a second, at the same step. Any rank may ask."""
        self.stop_reason = self.stop_reason or reason
        self.should_stop = True

    # --- where it stands -------------------------------------------------------------------

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
    def is_last_batch(self) -> bool:
        """Whether the last micro-batch of the epoch is done, where that can be known."""
        return self.progress.batch_idx == self.num_training_batches

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
        """Optimizer steps of the whole fit, for schedulers that need to know; inf without end.

        Raises:
            RuntimeError: no fit is running.
        """
        if self.plan is None:
            raise RuntimeError("estimated_stepping_batches is known inside fit only, from configure_optimizers on.")
        return self.plan.total_steps

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
    def run_folder(self) -> Path:
        """Folder of the run's output, the same on every rank. It is made by the first that writes into it.

        Raises:
            RuntimeError: no run has started, and no `default_root_dir` was given.
        """
        if self._run_folder is None:
            if self.config.default_root_dir is None:
                raise RuntimeError("the run's folder is decided when a run starts, unless default_root_dir is given.")
            self._run_folder = Path(self.config.default_root_dir)
        return self._run_folder

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
        self._unshared.update(log.unshared_names())
        self.callback_metrics |= _tensors(logged.for_callbacks)
        self.metric_steps |= dict.fromkeys(logged.for_callbacks, self.global_step)
        self.progress_bar_metrics |= logged.for_progress_bar
        if not logged.for_logger:
            return
        self.logged_metrics |= _tensors(logged.for_logger)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(logged.for_logger, step=self.global_step)

    # --- the life of a run -----------------------------------------------------------------

    @contextmanager
    def _session(self, stage: str, task: Task, datamodule: DataModule | None) -> Generator[HookTable]:
        """Meet the other ranks, prepare task and data, and clean up whatever happens in between."""
        if self._to_launch:
            relaunch(self._to_launch)  # never returns: the ranks run this program from its start
        check_hooks(task, Task)
        if datamodule is not None:
            check_hooks(datamodule, DataModule)
        self.task, self.datamodule = task, datamodule
        task.trainer = self
        self._merge_task_callbacks(task)
        with ExitStack() as cleanup:
            cleanup.enter_context(torch_settings(self.config))
            try:
                self.strategy.setup()
                self._agree()
                self._prepare_data()
                cleanup.callback(self._teardown, stage)
                if datamodule is not None:
                    datamodule.trainer = self
                    datamodule.setup(stage)
                for callback in self.callbacks:
                    callback.setup(self, task, stage)
                task.setup(stage)
                task.configure_model()
                self.strategy.precision.convert_module(task)
                task.to(self.strategy.device)
                yield HookTable(self.callbacks, task)
            except BaseException as error:
                self._report(error)
                raise

    def _teardown(self, stage: str) -> None:
        self.training = self.validating = self.testing = self.predicting = self.sanity_checking = False
        self.fitting, self.active_log = False, None
        for callback in self.callbacks:
            callback.teardown(self, self.task, stage)
        self.task.teardown(stage)
        if self.datamodule is not None:
            self.datamodule.teardown(stage)
        self.strategy.teardown()

    def _report(self, error: BaseException) -> None:
        """Tell the callbacks, and torchrun's error file, which shows the first failure of all ranks."""
        for callback in self.callbacks:
            callback.on_exception(self, self.task, error)
        if self.datamodule is not None:
            self.datamodule.on_exception(error)
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            handler = get_error_handler()
            handler.initialize()
            handler.record_exception(error)

    def _agree(self) -> None:
        """One seed and one run folder for all ranks, decided by rank 0 once."""
        seed = self.config.seed
        if seed is None:
            # What the program seeded torch with, or the random number torch seeded itself with.
            seed = self.strategy.broadcast(torch.initial_seed() % 2**63, name="seed")
        self.seed = seed
        if self._run_folder is None and self.config.default_root_dir is None:
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%SZ")
            base = Path("runs") / f"{type(self.task).__name__}-{now}"
            folder, number = base, 1
            while folder.exists():  # another run of this second
                number += 1
                folder = base.with_name(f"{base.name}-{number}")
            self._run_folder = Path(self.strategy.broadcast(os.fspath(folder), name="run folder"))

    def _prepare_data(self) -> None:
        """Let the first rank of each host prepare the data, while the others wait."""
        prepared = [self.task, *([self.datamodule] if self.datamodule is not None else [])]
        if all(
            not overrides(item, "prepare_data", Task if isinstance(item, Task) else DataModule) for item in prepared
        ):
            return
        problem: Exception | None = None
        try:
            if self.local_rank == 0:
                for item in reversed(prepared):
                    item.prepare_data()
        except Exception as error:
            problem = error
        failures = self.strategy.gather_objects(None if problem is None else repr(problem), name="prepare_data")
        if problem is not None:
            raise problem
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RuntimeError(f"prepare_data failed on rank {rank}: {failure}")

    def _merge_task_callbacks(self, task: Task) -> None:
        own = task.configure_callbacks()
        own = cast("list[Callback]", list(own) if isinstance(own, (list, tuple)) else [own])  # pyright: ignore
        for callback in own:
            check_hooks(callback, Callback)
        kinds = {type(callback) for callback in own}
        self.callbacks = _ordered([*(c for c in self.callbacks if type(c) not in kinds), *own])

    def _log_hyperparameters(self) -> None:
        if not self.is_global_zero:
            return
        hyperparameters: dict[str, Any] = {}
        for holder in (self.datamodule, self.task):
            if holder is not None and vars(holder).get("_log_hyperparameters"):
                hyperparameters |= holder.hparams
        if hyperparameters:
            for logger in self.loggers:
                logger.log_hyperparams(hyperparameters)

    # --- loaders ---------------------------------------------------------------------------

    def _dealing(self, *, training: bool) -> Dealing:
        return Dealing(
            self.strategy, self.seed, training, self.config.use_distributed_sampler, not self.config.overfit_batches
        )

    def _from_holders(self, method: str) -> Any:
        for holder in (self.datamodule, self.task):
            if holder is not None and (loaders := getattr(holder, method)()) is not None:
                return loaders
        return None

    def _train_loader(self, given: Any) -> PreparedLoader:
        loader = self._from_holders("train_dataloader") if given is None else given
        if loader is None:
            raise ValueError(
                "fit has no training loader: give one, trainer.fit(task, train_dataloaders=…), or write train_dataloader "
                "in the task or a DataModule."
            )
        if isinstance(loader, Mapping) or (
            isinstance(loader, (list, tuple)) and any(isinstance(item, torch.utils.data.DataLoader) for item in loader)  # pyright: ignore
        ):
            raise TypeError(
                f"the training loader is a {type(loader).__name__} of loaders, which is not supported yet: expected one "
                "loader. Join the datasets (torch.utils.data.ConcatDataset or StackDataset)."
            )
        limit = self.config.overfit_batches or self.config.limit_train_batches
        prepared = prepare_loader(loader, "training", limit, self._dealing(training=True))
        if prepared.length == 0:
            raise ValueError(f"{LIMITS['training']}={limit} leaves no batch to train on: expected 1 or more.")
        if prepared.length is None and self.world_size > 1:
            raise ValueError(
                f"the training loader has no length: on {self.world_size} ranks one could end before the others, which is "
                "not supported yet. Give it a __len__, equal on all ranks, or set limit_train_batches to a number that "
                "every rank can give."
            )
        return prepared

    def _loaders(self, stage: Stage, given: Any, train_given: Any = None) -> list[PreparedLoader]:
        limit: int | float = getattr(self.config, LIMITS[stage.data])
        if limit == 0:
            return []
        overfit = self.config.overfit_batches
        loaders = self._from_holders(stage.loaders) if given is None else given
        if loaders is None:
            return []
        if overfit and stage is VALIDATION:  # validated on what is trained on
            limit, loaders = overfit, self._from_holders("train_dataloader") if train_given is None else train_given
        if not isinstance(loaders, (list, tuple)) or not _holds_loaders(loaders):
            loaders = [loaders]
        dealing = self._dealing(training=False)
        return [prepare_loader(loader, stage.data, limit, dealing) for loader in cast("list[Any]", loaders)]

    def _transfer(self) -> Transfer | None:
        """How a batch comes to the device; None where it needs nothing."""
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        methods: list[Any] = []
        replaced = False
        for name in names:
            if self.datamodule is not None and overrides(self.datamodule, name, DataModule):
                methods.append(getattr(self.datamodule, name))
                replaced = True
            else:
                methods.append(getattr(self.task, name))
                replaced |= overrides(self.task, name, Task)
        device, precision = self.strategy.device, self.strategy.precision
        if not replaced and device.type == "cpu" and not precision.converts_batches:
            return None
        before, to_device, after = methods

        def transfer(batch: Any, index: int) -> Any:
            batch = to_device(before(batch, index), device, index)
            if precision.converts_batches:
                batch = cast_floats(batch, precision.dtype)
            return after(batch, index)

        return transfer

    # --- evaluation and checkpoints --------------------------------------------------------

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
    ) -> tuple[list[dict[str, float]], list[list[Any]]]:
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        task = task if task is not None else getattr(self, "task", None)
        if task is None:
            raise ValueError(
                f"{stage_name} needs a task: trainer.{stage_name}(task, …), since none was trained before."
            )
        if stage is not PREDICTION:
            _check_task(task, stage_name, (stage.step,))
        if ckpt_path == "auto":
            raise ValueError(f"ckpt_path='auto' is for fit; {stage_name} takes a path, 'best' or 'last'.")
        with self._session(stage_name, task, datamodule or getattr(self, "datamodule", None)) as hooks:
            if ckpt_path is not None:
                checkpoint = self._read(ckpt_path)
                restore(self, checkpoint, training=False)
            # Without DDP's constructor nobody has made the ranks' weights equal.
            self.strategy.broadcast_module(task)
            loaders = self._loaders(stage, dataloaders)
            if not loaders:
                raise ValueError(
                    f"{stage_name} has no loader: give one, or write {stage.loaders} in the task or a DataModule; and "
                    f"{LIMITS[stage.data]} must be above 0."
                )
            flag = {"validate": "validating", "test": "testing", "predict": "predicting"}[stage_name]
            setattr(self, flag, True)
            logged, kept = EvaluationLoop(self, task, hooks, stage, self._transfer()).run(loaders, keep=keep)
            setattr(self, flag, False)
        results = _by_loader(logged, len(loaders))
        if verbose and self.is_global_zero:
            print_results(results, stage_name)
        return results, kept

    def _checkpoint_to_resume(self, ckpt_path: str | os.PathLike[str] | None) -> Checkpoint | None:
        if ckpt_path is None:
            return None
        if ckpt_path == "auto":
            folders = [callback.folder(self) for callback in self.checkpoint_callbacks]
            newest = self.strategy.broadcast(newest_intact(folders) if self.is_global_zero else None, name="newest")
            if newest is None:
                return None
            ckpt_path = newest
        checkpoint = self._read(ckpt_path)
        theirs = checkpoint.training.get("seed", self.seed)
        if self.config.seed not in (None, theirs):
            raise CheckpointError(
                f"{checkpoint.path} was trained with seed={theirs}, this Trainer has seed={self.config.seed}: the order of "
                "the samples depends on it. Use the same, or leave it out."
            )
        self.seed = theirs
        return checkpoint

    def _read(self, ckpt_path: str | os.PathLike[str]) -> Checkpoint:
        if ckpt_path in ("best", "last"):
            callback = self.checkpoint_callback
            path = "" if callback is None else callback.best_model_path if ckpt_path == "best" else callback.last_path
            if not path and callback is not None and ckpt_path == "last":
                path = str(newest_intact([callback.folder(self)]) or "")
            if not path:
                raise CheckpointError(
                    f"ckpt_path={ckpt_path!r}: this Trainer's ModelCheckpoint has saved none. Give a path."
                )
            ckpt_path = path
        return read_checkpoint(ckpt_path)


def _all_callbacks(
    config: TrainerConfig,
    given: Callback | Sequence[Callback] | None,
    logger: Logger | Sequence[Logger] | bool | None,
    *,
    development: bool,
) -> list[Callback]:
    callbacks = [given] if isinstance(given, Callback) else list(given or ())
    if isinstance(logger, Logger):
        callbacks.append(logger)
    elif not isinstance(logger, bool) and logger is not None:
        callbacks += list(logger)
    for callback in callbacks:
        if not isinstance(callback, Callback):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise TypeError(f"callbacks hold {what}: expected objects of subclasses of Callback.")
    if len(set(map(id, callbacks))) != len(callbacks):
        raise ValueError("the same callback object is given twice: expected each once.")
    if development:  # fast_dev_run leaves no trace and stops for nothing
        callbacks = [c for c in callbacks if not isinstance(c, (Logger, ModelCheckpoint, EarlyStopping))]

    def missing(kind: type) -> bool:
        return not any(isinstance(callback, kind) for callback in callbacks)

    if not config.enable_checkpointing and not development and not missing(ModelCheckpoint):
        raise ValueError("enable_checkpointing=False, but the callbacks hold a ModelCheckpoint: drop one of them.")
    if config.enable_model_summary:
        callbacks += [kind() for kind in (ModelSummary, StepPanel) if missing(kind)]
    if config.enable_progress_bar and missing(ProgressBar):
        callbacks.append(ProgressBar())
    # Loggers given as `logger` replace the default one; those among the callbacks stand beside it.
    if config.logger and (logger is None or logger is True) and missing(TensorBoardLogger):
        callbacks.append(TensorBoardLogger())
    if config.enable_checkpointing and missing(ModelCheckpoint):
        callbacks.append(ModelCheckpoint())
    return _ordered(callbacks)


def _ordered(callbacks: list[Callback]) -> list[Callback]:
    """Those who decide by metrics last, and the checkpoints behind them: they save what the others decided."""
    return sorted(callbacks, key=lambda callback: (callback.monitors, isinstance(callback, ModelCheckpoint)))


def _check_task(task: Task, purpose: str, needed: Sequence[str]) -> None:
    if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a Task, received {type(task).__name__}: subclass samestep.trainer.Task.")
    for name in needed:
        if not overrides(task, name, Task):
            raise TypeError(
                f"{type(task).__name__} has no {name}, which {purpose} needs: expected a method of that name."
            )


def _holds_loaders(loaders: Any) -> bool:
    """A list of loaders, not a list of batches."""
    return all(
        isinstance(item, torch.utils.data.DataLoader)
        or (hasattr(item, "__iter__") and not isinstance(item, (torch.Tensor, Mapping, list, tuple, str)))
        for item in loaders
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
