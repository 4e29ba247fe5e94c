"""The loaders of a fit: asked for when it starts, and again where `reload_dataloaders_every_n_epochs` says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .checkpoint import Checkpoint
from .data.position import Position
from .data.prepared import PreparedLoader
from .data.source import DataSource
from .data.transfer import moved_ahead
from .data.windows import Window
from .evaluation import VALIDATION
from .progress import Progress

if TYPE_CHECKING:
    from .trainer import Trainer


class FitLoaders:
    """The training loader and the validation loaders of a fit.

    Args:
        trainer: of the fit.
        training: the loader given to `fit`; None: task or data module have it.
        validation: the loaders given to `fit`; None: task or data module have them.
        checkpoint: that the run goes on from.

    Raises:
        TypeError, ValueError: there is no training loader, or one does not fit.
    """

    training: PreparedLoader
    """For training."""
    validation: list[PreparedLoader]
    """For validation."""

    def __init__(self, trainer: Trainer, training: Any, validation: Any, checkpoint: Checkpoint | None) -> None:
        position = None if checkpoint is None else Position.from_state(checkpoint.training.get("position"))
        self._source = source = DataSource(trainer, position)
        self._trainer, self._given = trainer, (training, validation)
        self.transfer = source.transfer()
        """How a batch comes to the device; None where it needs nothing."""
        self._ahead = False
        self._every = trainer.config.reload_dataloaders_every_n_epochs
        reloads = (training is None and source.gives("train_dataloader")) or (
            validation is None and source.gives(VALIDATION.loaders)
        )
        if self._every and not reloads:
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={self._every} with loaders given to fit: there is nothing to ask for new "
                "ones. Write train_dataloader or val_dataloader in the task or a DataModule."
            )
        epoch = trainer.progress.epoch
        if checkpoint is not None and "progress" in checkpoint.training:
            resumed = Progress()
            resumed.load_state_dict(checkpoint.training["progress"])
            epoch = resumed.epoch
        self._load(self._due_in(epoch))

    def of_epoch(self, epoch: int) -> bool:
        """Have the loaders of an epoch; True: they are new ones."""
        if not self._every or self._due_in(epoch) == self._loaded_in:
            return False
        self._load(self._due_in(epoch))
        return True

    def _due_in(self, epoch: int) -> int:
        """The epoch at whose start the loaders of this one are asked for."""
        return epoch // self._every * self._every if self._every else self._trainer.progress.epoch

    def _load(self, epoch: int) -> None:
        trainer, (training, validation) = self._trainer, self._given
        self._loaded_in = epoch
        # Whoever gives the loaders sees the epoch that they are for, also when a run is resumed in a later one.
        now, trainer.progress.epoch = trainer.progress.epoch, epoch
        try:
            self.training = trainer.training_data = self._source.training(training)
            self.validation = self._source.evaluation(
                VALIDATION.data, VALIDATION.loaders, validation, training_given=training
            )
        finally:
            trainer.progress.epoch = now
        trainer.train_dataloader = self.training.loader
        trainer.val_dataloaders = [prepared.loader for prepared in self.validation]

    # --- the way to the device -------------------------------------------------------------

    def batches(self, skip: int, *, whole_windows: bool) -> Iterator[Any]:
        """The training batches of this rank behind the first `skip`; on CUDA one is copied while the one before computes.

        `whole_windows`: those of a step are read before it begins.
        """
        batches = self.training.batches(skip)
        self._ahead = self._copies_ahead() and not whole_windows
        transfer = self.transfer
        if not self._ahead or transfer is None:
            return batches
        return moved_ahead(batches, lambda batch: transfer(batch, 0), self._trainer.strategy.device)

    def on_device(self, windows: Iterator[Window]) -> Iterator[Window]:
        """The windows with their batches on the device."""
        transfer = self.transfer
        if transfer is None or self._ahead:
            return windows
        return (window._replace(batches=(transfer(batch, 0) for batch in window.batches)) for window in windows)

    def _copies_ahead(self) -> bool:
        """Whether it is right, and worth it, to read a batch before the step in front of it.

        On CUDA, from workers and pinned memory, and by the trainer alone: a dataset in this process, or a hook, would
        take random numbers out of turn; memory that is not pinned would be waited for.
        """
        loader: Any = self.training.loader
        return (
            self._trainer.strategy.device.type == "cuda"
            and isinstance(loader, DataLoader)
            and loader.num_workers > 0
            and loader.pin_memory
            and self.training.stateful is None
            and not self._source.replaces_transfer
        )
