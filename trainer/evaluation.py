"""Validation, test and prediction: every sample once, on the bare task, never through DDP's wrapper."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..callbacks.callback import Callback
from .control import ControlWord
from .data.indices import recorded
from .data.prepared import PreparedLoader
from .data.sampling import check_same_order
from .data.source import Transfer
from .data.transfer import move_to_device
from .hooks import HookTable, check_takes_all_arguments, overrides
from .loop import with_batch_index
from .metrics.exchange import updates_of
from .metrics.log import Logged, MetricLog
from .metrics.objects import reset_updated
from .predictions import Gathered, Kept
from .task import Task

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(frozen=True)
class Stage:
    """A kind of evaluation: the names that belong together."""

    name: str
    """As in the hooks, `on_<name>_start`."""
    method: str
    """The method of `Trainer` that runs it by itself."""
    flag: str
    """The attribute of `Trainer` that says it runs."""
    step: str
    """The task's method."""
    loaders: str
    """The method of task and data module that gives the loaders."""
    data: str
    """The key of `data.loaders.LIMITS`."""


VALIDATION = Stage("validation", "validate", "validating", "validation_step", "val_dataloader", "validation")
TEST = Stage("test", "test", "testing", "test_step", "test_dataloader", "test")
PREDICTION = Stage("predict", "predict", "predicting", "predict_step", "predict_dataloader", "prediction")


class EvaluationEnded(BaseException):
    """All ranks agreed to leave, in the middle of an evaluation. The fit around it does."""


class EvaluationLoop:
    """Runs a step of the task over loaders, in eval mode and without gradients."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        hooks: HookTable,
        stage: Stage,
        loaders: Sequence[PreparedLoader],
        transfer: Transfer | None,
    ) -> None:
        """Prepare.

        Raises:
            TypeError: there are several loaders, and the step or a hook can't be told which.
        """
        self.trainer, self.task, self.hooks, self.stage, self.transfer = trainer, task, hooks, stage, transfer
        self.loaders = loaders
        if len(loaders) > 1:
            check_takes_loader_index(getattr(task, stage.step))
            for moment in ("start", "end"):
                for holder, base in (*((callback, Callback) for callback in trainer.callbacks), (task, Task)):
                    check_takes_all_arguments(holder, f"on_{stage.name}_batch_{moment}", base)
        self.step = with_batch_index(getattr(task, stage.step))

    def run(
        self,
        *,
        most: int | None = None,
        keep: bool = False,
        gather: bool = False,
        before_end: Callable[[], None] | None = None,
        control: ControlWord | None = None,
    ) -> tuple[Logged, list[list[Any]]]:
        """Evaluate.

        Args:
            most: batches of each loader at most.
            keep: also return what the step returned, by loader and batch, on the CPU.
            gather: as one rank would have, instead of this rank's.
            before_end: called when the metrics are published, before the hooks that may save a checkpoint.
            control: asked between batches whether all ranks leave.

        Raises:
            TypeError, ValueError: what the step returned can't be gathered.
            EvaluationEnded: all ranks leave.
        """
        trainer, task, loaders = self.trainer, self.task, self.loaders
        several = len(loaders) > 1
        gather = gather and trainer.world_size > 1
        kept = [Gathered(trainer.strategy, loader) if gather else Kept() for loader in loaders] if keep else []
        lengths = [math.inf if loader.length is None else loader.length for loader in loaders]
        trainer.evaluation_batches = sum(lengths if most is None else (min(most, length) for length in lengths))
        log = MetricLog(trainer.strategy, task, evaluation=True, loaders=len(loaders))
        before, trainer.active_log = trainer.active_log, log
        held = {} if before is None else updates_of(task)
        # On each rank BatchNorm has seen other samples: rank 0's statistics count, as in the checkpoint.
        trainer.strategy.synchronize(task)
        shared = self._shared_batches(most)
        with self._mode():
            self._call("start")
            self._call("epoch_start")
            with nullcontext() if control is None else control.pace_of_its_own():
                for index, loader in enumerate(loaders):
                    for batch_idx, output in enumerate(self._run_loader(index, loader, log, most, several=several)):
                        if keep:
                            on_cpu = move_to_device(output, torch.device("cpu"))
                            kept[index].add(on_cpu, len(trainer.batch_indices or ()), batch_idx)
                        if control is not None and batch_idx < shared[index] and control.leaves():
                            reset_updated(task, held)  # or the run that goes on would count these batches twice
                            raise EvaluationEnded
            log.batch = trainer.batch_indices = None
            if before is not None:
                log.check_apart(before, held)
            logged = log.reduce_epoch()
            trainer.metrics.publish(logged, log)
            if self.hooks.of(f"on_{self.stage.name}_epoch_end"):  # they may read what is there, and log more
                self._call("epoch_end")
                more = log.reduce_epoch()
                trainer.metrics.publish(more, log)
                logged.add(more)
            if before_end is not None:
                before_end()
            trainer.active_log = None  # what is logged from here on would be lost
            self._call("end")
        # Out of the mode: states made under inference_mode could not be updated in training.
        log.close_epoch()
        trainer.active_log = before
        return logged, [each.result() for each in kept]

    def _shared_batches(self, most: int | None) -> list[int]:
        """For each loader, the batches that every rank has: only behind these can all ranks agree on something.

        Raises:
            RuntimeError: a loader's order differs from rank to rank.
        """
        if self.trainer.world_size > 1:
            for loader in self.loaders:
                loader.set_epoch(self.trainer.current_epoch)
            orders = [loader.order_digest() for loader in self.loaders]
        else:
            orders = [None] * len(self.loaders)
        mine = [loader.length or 0 for loader in self.loaders], orders
        every = self.trainer.strategy.gather_objects(mine, name=f"lengths of the {self.stage.data} loaders")
        for of_loader in zip(*(orders for _, orders in every), strict=True):
            check_same_order(of_loader, self.stage.data)
        every_length = zip(*(lengths for lengths, _ in every), strict=True)
        return [min(lengths if most is None else (*lengths, most)) for lengths in every_length]

    def _run_loader(
        self, index: int, loader: PreparedLoader, log: MetricLog, most: int | None, *, several: bool
    ) -> Generator[Any]:
        """Run the step on each batch of a loader, and give what it returned."""
        stage, trainer, task = self.stage, self.trainer, self.task
        starts, ends = self.hooks.of(f"on_{stage.name}_batch_start"), self.hooks.of(f"on_{stage.name}_batch_end")
        where = (index,) if several else ()
        log.dataloader_idx, log.batch = index, None
        loader, indices = recorded(loader) if stage is PREDICTION else (loader, None)
        loader.set_epoch(trainer.current_epoch)
        if most == 0:
            return
        for batch_idx, batch in enumerate(loader.batches()):
            if self.transfer is not None:
                batch = self.transfer(batch, index)
            log.batch = batch
            trainer.batch_indices = None if indices is None else indices.next_batch()
            for hook in starts:
                hook(trainer, task, batch, batch_idx, *where)
            with trainer.strategy.autocast():
                output = self.step(batch, batch_idx, *where)
            if isinstance(output, (Generator, Coroutine)):
                output.close()
                raise TypeError(
                    f"{type(task).__name__}.{stage.step} returned a {type(cast('Any', output)).__name__}, so none of it has "
                    "run: expected a plain function. Leave out `yield`, `async` and `await`."
                )
            log.count_batch()
            for hook in ends:
                hook(trainer, task, output, batch, batch_idx, *where)
            yield output
            if most is not None and batch_idx + 1 >= most:
                break
        else:
            if loader.length is not None and log.batches.get(index, 0) < loader.length:
                raise RuntimeError(
                    f"the {stage.data} loader gave {log.batches.get(index, 0)} batches, but its length is {loader.length}: the "
                    "result would be that of a part. Correct the dataset (an item that raises StopIteration?) or its __len__."
                )

    def _call(self, moment: str) -> None:
        for hook in self.hooks.of(f"on_{self.stage.name}_{moment}"):
            hook(self.trainer, self.task)

    @contextmanager
    def _mode(self) -> Generator[None]:
        """Eval mode without gradients; afterwards each module has the mode it had."""
        task, name = self.task, self.stage.name
        modes = [(module, module.training) for module in task.modules()]
        getattr(task, f"on_{name}_model_eval")()
        try:
            with self._without_gradients():
                yield
        finally:
            if overrides(task, f"on_{name}_model_train", Task):
                getattr(task, f"on_{name}_model_train")()
            else:
                for module, training in modes:
                    module.training = training

    def _without_gradients(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self.trainer.config.inference_mode else torch.no_grad()


def check_takes_loader_index(step: Callable[..., Any]) -> None:
    """Refuse a step that can't be told which of several loaders a batch is of."""
    try:
        inspect.signature(step).bind(None, 0, 0)
    except TypeError:
        raise TypeError(
            f"{step.__qualname__}{inspect.signature(step)} can't be told the loader: with several loaders expected "
            "(batch, batch_idx, dataloader_idx)."
        ) from None
