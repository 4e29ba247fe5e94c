"""Where the loaders of a run come from: an argument, the data module, or the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from ..data_module import DataModule
from ..hooks import overrides
from ..task import Task
from .loaders import LIMITS, Dealing, PreparedLoader, prepare_loader
from .transfer import cast_floats

if TYPE_CHECKING:
    from ..trainer import Trainer

# Takes a batch and the index of its loader.
Transfer = Callable[[Any, int], Any]


class DataSource:
    """The prepared loaders of a run, and the way of a batch to the device."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._holders: list[Task | DataModule] = [trainer.task]
        if trainer.datamodule is not None:
            self._holders.insert(0, trainer.datamodule)

    def training(self, given: Any) -> PreparedLoader:
        """The training loader.

        Raises:
            TypeError, ValueError: there is none, it is empty, or it can't be dealt to the ranks.
        """
        trainer, config = self._trainer, self._trainer.config
        loader = self._of_holders("train_dataloader") if given is None else given
        if loader is None:
            raise ValueError(
                "fit has no training loader: give one, trainer.fit(task, train_dataloaders=…), or write train_dataloader "
                "in the task or a DataModule."
            )
        if isinstance(loader, Mapping) or (isinstance(loader, (list, tuple)) and _any_loader(loader)):
            raise TypeError(
                f"the training loader is a {type(cast('Any', loader)).__name__} of loaders, which is not supported yet: "
                "expected one loader. Join the datasets (torch.utils.data.ConcatDataset or StackDataset)."
            )
        limit = config.overfit_batches or config.limit_train_batches
        prepared = prepare_loader(loader, "training", limit, self._dealing(training=True))
        if limit == 0:
            raise ValueError(f"{LIMITS['training']}={limit} leaves no batch to train on: expected 1 or more.")
        if prepared.length is None and trainer.world_size > 1 and trainer.strategy.uneven_inputs == "error":
            raise ValueError(
                f"the training loader has no length: on {trainer.world_size} ranks one could end before the others, which "
                "uneven_inputs='error' refuses. Give it a __len__, equal on all ranks, set limit_train_batches to a number "
                "that every rank can give, or choose uneven_inputs='stop' or 'join'."
            )
        return prepared

    def evaluation(self, kind: str, method: str, given: Any, *, training_given: Any = None) -> list[PreparedLoader]:
        """The loaders of an evaluation; an empty list where there are none, or their limit is 0.

        Args:
            kind: a key of `LIMITS`.
            method: of task and data module, that gives them.
            given: the argument.
            training_given: the training loader that was an argument; with `overfit_batches` it is validated on.
        """
        config = self._trainer.config
        limit: int | float = getattr(config, LIMITS[kind])
        if limit == 0:
            return []
        loaders = self._of_holders(method) if given is None else given
        if loaders is None:
            return []
        if config.overfit_batches and kind == "validation":
            limit = config.overfit_batches
            loaders = self._of_holders("train_dataloader") if training_given is None else training_given
        if isinstance(loaders, Mapping):
            raise TypeError(
                f"the {kind} loaders are a dict, which is not supported yet: expected one loader, or a list."
            )
        items = cast("list[Any]", loaders) if isinstance(loaders, (list, tuple)) else []
        # A list that is itself the loader holds batches; one with a DataLoader in it holds loaders, or mistakes.
        several = isinstance(loaders, (list, tuple)) and (_any_loader(items) or all(map(_is_loader, items)))
        # A shuffle has no meaning in a prediction, whose order is how it is told apart.
        dealing = self._dealing(training=False, shuffle=kind != "prediction")
        each: list[Any] = list(items) if several else [cast("Any", loaders)]
        return [prepare_loader(loader, kind, limit, dealing) for loader in each]

    def transfer(self) -> Transfer | None:
        """How a batch comes to the device; None where it needs nothing."""
        before, to_device, after = (
            self._override_of(name)
            for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        )
        device, precision = self._trainer.strategy.device, self._trainer.strategy.precision
        replaced = before is not None or to_device is not None or after is not None
        if not replaced and device.type == "cpu" and not precision.converts_batches:
            return None
        move = to_device or self._trainer.task.transfer_batch_to_device

        def transfer(batch: Any, index: int) -> Any:
            if before is not None:
                batch = before(batch, index)
            batch = move(batch, device, index)
            if precision.converts_batches:
                batch = cast_floats(batch, precision.dtype)
            return batch if after is None else after(batch, index)

        return transfer

    def _dealing(self, *, training: bool, shuffle: bool = True) -> Dealing:
        trainer, config = self._trainer, self._trainer.config
        shuffle = shuffle and not config.overfit_batches
        joins = trainer.strategy.uneven_inputs == "join"
        return Dealing(trainer.strategy, trainer.seed, training, config.use_distributed_sampler, shuffle, joins)

    def _of_holders(self, method: str) -> Any:
        for holder in self._holders:
            loaders = getattr(holder, method)()
            if loaders is not None:
                return loaders
        return None

    def _override_of(self, name: str) -> Callable[..., Any] | None:
        for holder in self._holders:
            if overrides(holder, name, Task if isinstance(holder, Task) else DataModule):
                return getattr(holder, name)
        return None


def _is_loader(item: Any) -> bool:
    """A loader, not a batch of a list that is itself the loader."""
    batch_like = isinstance(item, (torch.Tensor, Mapping, list, tuple, str))
    return isinstance(item, DataLoader) or (hasattr(item, "__iter__") and not batch_like)


def _any_loader(items: Any) -> bool:
    return any(isinstance(item, DataLoader) for item in items)
