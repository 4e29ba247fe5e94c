"""What `predict` returns: each rank's batches, or those of all ranks as one rank would have made them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from torch.utils.data import BatchSampler

from ..callbacks.samples import check_batched, joined, taken
from ..strategies.base import Strategy
from .data.loaders import PreparedLoader
from .data.streams import StreamShard


class Kept:
    """The predictions of this rank for one loader."""

    def __init__(self) -> None:
        self._predictions: list[Any] = []

    def add(self, prediction: Any, samples: int, batch_idx: int) -> None:
        """Take the prediction of a batch, on the CPU."""
        self._predictions.append(prediction)

    def result(self) -> list[Any]:
        """The predictions by batch."""
        return self._predictions


class Gathered(Kept):
    """The predictions of all ranks for one loader.

    Rank r of W has the samples at places r, r+W, … of the loader's order, so places tell where each belongs. Where whole
    batches are dealt (a batch sampler of the user's own, or a loader without batches), the same is true of batches, which
    may then hold anything.

    Raises:
        ValueError: the samples are not dealt in turn, so no order is known in which they could be put.
    """

    def __init__(self, strategy: Strategy, loader: PreparedLoader) -> None:
        if isinstance(loader.shard, StreamShard):
            raise ValueError(
                f"predict gathers the predictions of all ranks in the order of the samples, which nobody knows of the stream "
                f"{type(loader.shard.dataset).__name__}: expected a dataset with a length. Or take predict(…, gather=False) for "
                "this rank's predictions, or return_predictions=False."
            )
        if loader.shard is None or not getattr(loader.loader, "in_order", True):
            raise ValueError(
                "predict gathers the predictions of all ranks in the order of the samples, which is known only where the "
                f"trainer deals them in turn, and not with this {type(loader.loader).__name__}: expected a DataLoader over a "
                "dataset with a length, without DistributedSampler, use_distributed_sampler=False or in_order=False. Or take "
                "predict(…, gather=False) for this rank's predictions, or return_predictions=False."
            )
        super().__init__()
        self._strategy, self._size = strategy, loader.batch_size or 1
        self._of_samples = isinstance(getattr(loader.loader, "batch_sampler", None), BatchSampler)
        self._samples = 0

    def add(self, prediction: Any, samples: int, batch_idx: int) -> None:
        """Take the prediction of a batch, on the CPU.

        Raises:
            ValueError, TypeError: it can't be taken apart into its samples, or does not fit those before.
        """
        if self._of_samples:
            try:  # now, not after hours
                check_batched(prediction, samples, f"the prediction of batch {batch_idx}")
                joined([taken(each, []) for each in (*self._predictions[:1], prediction)])
            except (TypeError, ValueError) as error:
                remedy = "Or predict(…, gather=False), which keeps on each rank what predict_step returned."
                raise type(error)(f"{error} {remedy}") from None
            self._samples += samples
        self._predictions.append(prediction)

    def result(self) -> list[Any]:
        """The batches that one rank would have predicted, on every rank."""
        if not self._of_samples:
            every = self._strategy.gather_objects(self._predictions, name="predictions")
            nothing = object()
            dealt = chain.from_iterable(zip_longest(*every, fillvalue=nothing))
            return [prediction for prediction in dealt if prediction is not nothing]
        own = joined(self._predictions) if self._predictions else None
        every = self._strategy.gather_objects((self._samples, own), name="predictions")
        return in_turn(every, self._size)


def in_turn(every: Sequence[tuple[int, Any]], size: int) -> list[Any]:
    """Batches of `size` samples that were dealt in turn; for each rank their number, and one batch of all of its own."""
    ranks = len(every)
    places = [rank + ranks * number for rank, (samples, _) in enumerate(every) for number in range(samples)]
    order = sorted(range(len(places)), key=places.__getitem__)
    whole = joined([prediction for samples, prediction in every if samples])
    return [taken(whole, order[at : at + size]) for at in range(0, len(order), size)]
