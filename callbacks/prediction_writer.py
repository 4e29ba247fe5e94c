"""Writing predictions to files while they are made, and reading them back in the order of the dataset."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .callback import Callback
from .samples import check_batched, joined, mapped_parts, taken

if TYPE_CHECKING:
    from ..trainer import Task, Trainer

_INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Base of callbacks that store predictions of their own rank: override one or both of the `write_on_…` methods.

    Args:
        write_interval: "batch": call `write_on_batch_end`; "epoch": `write_on_epoch_end`; "batch_and_epoch": both. For an
            epoch all predictions of the rank are kept, on the CPU.

    Raises:
        ValueError: `write_interval` is another.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ValueError(
                f"{type(self).__name__}(write_interval={write_interval!r}): expected one of "
                f"{', '.join(map(repr, _INTERVALS))}."
            )
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        task: Task,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Store the prediction of a batch.

        Args:
            trainer: the run.
            task: the task.
            prediction: what `predict_step` returned, on its device.
            batch_indices: the dataset's indices of the samples, as the loader's sampler gave them; None where that can't
                be known (an iterable, a stream, `in_order=False`).
            batch: what was predicted.
            batch_idx: the batch of this rank and loader, from 0.
            dataloader_idx: the loader.
        """

    def write_on_epoch_end(
        self, trainer: Trainer, task: Task, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Store all predictions of this rank.

        Args:
            trainer: the run.
            task: the task.
            predictions: by batch, on the CPU; with several loaders a list of batches for each.
            batch_indices: for each loader, for each batch, as in `write_on_batch_end`.
        """

    def on_predict_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Begin with none."""
        self._predictions = [[] for _ in trainer.predict_dataloaders]
        self._indices = [[] for _ in trainer.predict_dataloaders]

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write, and keep what the end of the epoch needs."""
        indices = trainer.batch_indices
        self._indices[dataloader_idx].append(indices)
        if self.write_interval != "batch":
            self._predictions[dataloader_idx].append(_on_cpu(outputs))
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Write, and let go."""
        if self.write_interval != "batch":
            predictions = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(trainer, task, predictions, self._indices)
        self._predictions, self._indices = [], []


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict_step` returns into files, each rank its own, for `read_predictions` to put in order.

    With several ranks nothing is gathered: give `predict(…, return_predictions=False)`, and memory holds no more than a
    batch ("batch"), or this rank's share ("epoch"). Every file is complete or not there, and is read by
    `torch.load(file, weights_only=True)`:

    - `predictions-rank-00000/loader-0-batch-00000000.pt` ("batch"): `{"predictions": …, "indices": [3, 5, …]}`
    - `predictions-rank-00000.pt`, when the rank is done: `world_size`, and by loader and batch `indices` and
      `predictions` ("epoch"; else None)

    Args:
        output_dir: the folder; what an earlier run of a PredictionWriter left there is removed at the start.
        write_interval: "batch", "epoch" or "batch_and_epoch".

    Raises:
        ValueError: `write_interval` is another.
        TypeError: predictions are not tensors, numbers, strings, and lists, tuples or dicts of them.
    """

    def __init__(self, output_dir: str | os.PathLike[str], write_interval: str = "batch") -> None:
        if output_dir in _INTERVALS:
            raise ValueError(f"PredictionWriter({output_dir!r}): expected a folder first, then write_interval.")
        super().__init__(write_interval)
        self.output_dir = Path(output_dir)

    @property
    def state_key(self) -> str:
        """Distinct for each folder."""
        return f"PredictionWriter(output_dir={os.fspath(self.output_dir)!r})"

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        """Remove what another run left, whose number of ranks and batches may have been larger."""
        if trainer.local_rank == 0:  # each host may have a folder of its own
            for pattern in ("predictions-rank-*.pt", "predictions-rank-*/loader-*-batch-*.pt"):
                for file in self.output_dir.glob(pattern):
                    file.unlink(missing_ok=True)
        trainer.strategy.barrier(name="removal of old predictions")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        task: Task,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write a file for the batch."""
        content = {"predictions": _on_cpu(prediction), "indices": batch_indices}
        file = _batch_file(self.output_dir, trainer.global_rank, dataloader_idx, batch_idx)
        _write(file, content, check=batch_idx == 0)

    def on_predict_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Write the file of the rank, which says that it is complete."""
        content = {
            "world_size": trainer.world_size,
            "batched": [getattr(loader, "batch_sampler", None) is not None for loader in trainer.predict_dataloaders],
            "indices": self._indices,
            "predictions": None if self.write_interval == "batch" else self._predictions,
        }
        _write(_rank_file(self.output_dir, trainer.global_rank), content, check=True)
        super().on_predict_epoch_end(trainer, task)


def read_predictions(folder: str | os.PathLike[str], dataloader_idx: int | None = None) -> tuple[list[Any], Any]:
    """Read what a `PredictionWriter` wrote on any number of ranks.

    Args:
        folder: its `output_dir`.
        dataloader_idx: of several loaders, the one; may be left out where there was one.

    Returns:
        The indices of the predicted samples in the dataset, each once, in ascending order; and their predictions in that
        order as one batch: tensors of shape `[samples, …]`, or a list with one item for each sample.

    Raises:
        FileNotFoundError: a rank's file is missing, since its run did not come to its end, or is on another host.
        ValueError: there were several loaders, and none is chosen; files are of different runs, the indices are not known, or the predictions can't be told apart.
    """
    folder = Path(folder)
    first_rank = _read(_rank_file(folder, 0))
    world_size, loaders = int(first_rank["world_size"]), len(first_rank["indices"])
    if dataloader_idx is None and loaders > 1:
        raise ValueError(
            f"{folder} holds the predictions of {loaders} loaders: expected dataloader_idx, 0 to {loaders - 1}."
        )
    dataloader_idx = dataloader_idx or 0
    indices: list[Any] = []
    predictions: list[Any] = []
    for rank in range(world_size):
        file = _rank_file(folder, rank)
        told = _read(file)
        if told["world_size"] != world_size:
            raise ValueError(
                f"{file} is of a run on {told['world_size']} ranks, that of rank 0 of one on {world_size}."
            )
        if not 0 <= dataloader_idx < len(told["indices"]):
            raise ValueError(f"dataloader_idx={dataloader_idx}: {file} holds those of 0 to {len(told['indices']) - 1}.")
        kept = told["predictions"]
        for batch_idx, batch_indices in enumerate(told["indices"][dataloader_idx]):
            where = f"the prediction of batch {batch_idx} of rank {rank}"
            if batch_indices is None:
                raise ValueError(
                    f"{where} in {folder} has no indices: its loader is an iterable or a stream, whose order nobody knows. "
                    "Read the files by torch.load."
                )
            if kept is None:
                prediction = _read(_batch_file(folder, rank, dataloader_idx, batch_idx))["predictions"]
            else:
                prediction = kept[dataloader_idx][batch_idx]
            if not told["batched"][dataloader_idx] and len(batch_indices) == 1:
                prediction = [prediction]
            check_batched(prediction, len(batch_indices), where)
            indices += batch_indices
            predictions.append(prediction)
    if not predictions:
        return [], []
    first = {index: place for place, index in reversed(list(enumerate(indices)))}  # a sample may have come twice
    order = sorted(first)
    return order, taken(joined(predictions), [first[index] for index in order])


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"predictions-rank-{rank:05d}.pt"


def _batch_file(folder: Path, rank: int, loader: int, batch: int) -> Path:
    return folder / f"predictions-rank-{rank:05d}" / f"loader-{loader}-batch-{batch:08d}.pt"


def _write(file: Path, content: dict[str, Any], *, check: bool) -> None:
    """Write a file that is complete or not there; `check`: see that it can be read without running code."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        if check:
            try:
                torch.load(beside, weights_only=True)
            except pickle.UnpicklingError as error:
                raise TypeError(
                    f"the predictions of {file.name} can't be read again without running code: expected tensors, numbers, "
                    "strings, and lists, tuples or dicts of them (a numpy array as a tensor). "
                    f"({str(error).splitlines()[0]})"
                ) from None
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there: expected a file of each rank of a finished prediction. Run it again, or copy the files of "
            "other hosts beside it."
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def _on_cpu(prediction: Any) -> Any:
    """The prediction with its tensors on the CPU; what a view shows is copied, since a file would hold all behind it."""
    if isinstance(prediction, Tensor):
        moved = prediction.detach().cpu()
        return moved.clone() if moved.untyped_storage().nbytes() > moved.nbytes else moved
    return mapped_parts(prediction, _on_cpu)
