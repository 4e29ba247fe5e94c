"""How many samples fit into a device's memory, found without a collective that an out-of-memory could leave half done."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from .data.source import DataSource
from .loop import loss_of, with_batch_index
from .metrics.log import MetricLog
from .optimization import configure_optimizers
from .randomness import kept_rng
from .session import session
from .task import Task
from .task_check import check_initialized

if TYPE_CHECKING:
    from .trainer import Trainer


def largest_batch(trainer: Trainer, task: Task, loader: DataLoader[Any], *, most: int = 1 << 16) -> int:
    """Find how many samples of a micro-batch the device holds, the same on all ranks: what the fullest of them can take.

    Each rank tries sizes by itself, doubled until one does not fit, then halved in between: forward, backward and
    optimizer step on the bare task, without any communication. So a rank that runs out of memory keeps nobody waiting;
    afterwards the ranks take the smallest of their answers. What the trials changed is put back: parameters and buffers,
    random numbers, logged metrics; optimizers are those of a `configure_optimizers` of its own. Call it before `fit`;
    leave a margin, since a wrapper's buckets and longer samples take memory, too.

    Args:
        trainer: the run that is to come; its strategy, precision and device count.
        task: what will be trained, with automatic optimization.
        loader: its dataset and `collate_fn` make the trial batches, of the first samples, over and over where there are
            too few.
        most: samples at most.

    Raises:
        ValueError: `most` is below 1, the loader's dataset is empty or has no length, or the task optimizes by itself.
        torch.OutOfMemoryError: not even one sample fits on a rank; raised on all ranks.
    """
    if most < 1:
        raise ValueError(f"largest_batch(most={most}): expected 1 or more.")
    if not hasattr(getattr(loader, "dataset", None), "__len__"):
        raise ValueError(
            "largest_batch needs a DataLoader whose dataset has a length: trial batches are made of its samples."
        )
    if not len(cast("Any", loader.dataset)):
        raise ValueError("largest_batch: the loader's dataset is empty, expected one sample or more.")
    with session(trainer, "fit", task, None):
        if not task.automatic_optimization:
            raise ValueError("largest_batch with automatic_optimization=False: the task takes its steps by itself.")
        check_initialized(task)
        with _put_back(trainer, task):
            mine = _search(_trial(trainer, task, loader), most)
        sizes = trainer.strategy.gather_objects(mine, name="largest batch")
    if not min(sizes):
        ranks = ", ".join(str(rank) for rank, size in enumerate(sizes) if not size)
        raise torch.OutOfMemoryError(f"not even a micro-batch of one sample fits into the memory of rank {ranks}.")
    return min(sizes)


def _search(fits: Callable[[int], bool], most: int) -> int:
    """The largest size that fits, 0 where none does: doubled until one does not, then halved in between."""
    least = 1
    try:
        fitting = fits(1)
    except Exception:
        if most == 1:
            raise
        least, fitting = 2, fits(2)  # BatchNorm can't take a single sample
    good, size = least - 1, least
    while fitting:
        good = size
        if size == most:
            return most
        size = min(2 * size, most)
        fitting = fits(size)
    bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good if good >= least else 0


def _trial(trainer: Trainer, task: Task, loader: DataLoader[Any]) -> Callable[[int], bool]:
    """A function that tells whether a step of so many samples fits."""
    strategy, transfer = trainer.strategy, DataSource(trainer).transfer()
    optimizer = configure_optimizers(task)[0][0]
    step = with_batch_index(task.training_step)
    collate = cast("Callable[[list[Any]], Any]", loader.collate_fn)
    dataset = cast("Any", loader.dataset)

    def fits(size: int) -> bool:
        try:
            batch = collate([dataset[index % len(dataset)] for index in range(size)])
            if transfer is not None:
                batch = transfer(batch, 0)
            with strategy.autocast():
                output = step(batch, 0)
            if output is not None:
                loss_of(output, task).backward()
                optimizer.step()
        except torch.OutOfMemoryError:
            return False
        finally:
            optimizer.zero_grad()
            output = batch = None  # what they hold must be free before the next size
            gc.collect()
            if strategy.device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    return fits


@contextmanager
def _put_back(trainer: Trainer, task: Task) -> Generator[None]:
    """Let the trials run as steps of training, and undo what they change."""
    # On the CPU: a second copy on the device would take from the memory that is measured.
    tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*task.parameters(), *task.buffers())]
    modes = [(module, module.training) for module in task.modules()]
    log = MetricLog(trainer.strategy, task)
    task.train()
    trainer.training, trainer.active_log = True, log
    try:
        with kept_rng():
            yield
    finally:
        trainer.training, trainer.active_log = False, None
        log.close_epoch()
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for module, training in modes:
            module.training = training
