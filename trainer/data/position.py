"""Where a run stands in its training data, as a checkpoint keeps it; and how a run on other ranks goes on from there.

The ranks together have always consumed a prefix of one global order. So the position is a number of its items, and any
number of ranks can go on behind it: nothing is read again, and nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...callbacks.wording import counted
from ..progress import Progress
from .prepared import Place, PreparedLoader

ResumeBatch = Literal["keep", "scale"]


@dataclass(frozen=True)
class Position:
    """Where a run stands in its training data. Sizes are in samples; None: not known."""

    world_size: int
    accumulate_grad_batches: int
    micro_batch: int | None
    """Of one rank."""
    given_micro_batch: int | None
    """The same, as the program's loader has it."""
    dataset_size: int | None
    order: str | None
    """What puts the samples in order, where they are dealt by us."""
    items_per_batch: int
    """Items of the order in one batch of one rank: samples, or 1 where whole batches are dealt."""
    items_done: int | None
    """Items of the order that all ranks together have consumed in the epoch; None: no other number of ranks can go on."""
    length: int | None
    """Batches of one rank in the epoch."""

    @staticmethod
    def of(loader: PreparedLoader, world_size: int, accumulation: int, batches: int) -> Position:
        """The position after so many batches of an epoch."""
        return Position(
            world_size,
            accumulation,
            loader.batch_size,
            loader.given_batch_size,
            loader.dataset_size,
            loader.order,
            loader.items_per_batch,
            loader.items_done(batches),
            loader.length,
        )

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> Position | None:
        """What `state` returned; None for checkpoints that do not say."""
        return None if state is None else Position(**state)

    def state(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)

    @property
    def items_of_all(self) -> int:
        """Items in one batch of each rank."""
        return self.world_size * self.items_per_batch


def batch_size_here(
    position: Position | None, world_size: int, given: int | None, *, choice: ResumeBatch
) -> int | None:
    """The batch size of a rank: the loader's own, or what keeps the batch of all ranks on another number of them.

    Args:
        position: of the checkpoint; None: the run begins anew.
        world_size: the number of ranks here.
        given: of the program's loader. Another one than at the checkpoint is meant: it is taken as it is.
        choice: the option `resume_batch`.

    Raises:
        ValueError: the batch of all ranks can't be shared evenly.
    """
    if position is None or choice == "scale" or given is None or given != position.given_micro_batch:
        return given
    if position.micro_batch is None or given * world_size == position.world_size * position.micro_batch:
        return given
    together = position.world_size * position.micro_batch
    if together % world_size:
        fitting = [ranks for ranks in range(1, together + 1) if together % ranks == 0]
        raise ValueError(
            f"the checkpoint was trained with a batch of {counted(together, 'sample')} ({position.world_size} × "
            f"{position.micro_batch}), which {counted(world_size, 'rank')} can't share evenly: expected one of "
            f"{', '.join(map(str, fitting[:12]))} ranks. Or keep the {counted(given, 'sample')} of each rank's batch, and let the "
            "batch of all change: Trainer(resume_batch='scale')."
        )
    return together // world_size


# What must be the same inside an epoch: how it is said, what is counted, and its name.
_SAME = {
    "accumulate_grad_batches": ("with windows of", "micro-batch", "accumulate_grad_batches"),
    "dataset_size": ("with a training set of", "sample", "data"),
    "order": ("with samples in the order of", "", "shuffle or sampler"),
}


def why_not(then: Position, now: Position, choice: ResumeBatch) -> str | None:
    """Why a run of this shape can't go on inside the epoch of a checkpoint; None: it can.

    Args:
        then: of the checkpoint.
        now: of this run.
        choice: the option `resume_batch`.
    """
    for name, (before, noun, same) in _SAME.items():
        theirs, here = getattr(then, name), getattr(now, name)
        if theirs != here:
            return (
                f"{before} {_amount(theirs, noun)}; here it would go on {before} {_amount(here, noun)}, and what is left of "
                f"it would differ. Use the same {same}"
            )
    ranks = f"on {counted(then.world_size, 'rank')} with batches of {_amount(then.micro_batch, 'sample')}"
    here = f"{counted(now.world_size, 'rank')} with batches of {_amount(now.micro_batch, 'sample')}"
    if then.items_of_all == now.items_of_all and then.world_size == now.world_size:
        return None
    if then.items_done is None or now.items_done is None:
        return (
            f"{ranks}; {here} can't go on, since the trainer does not deal the samples of this loader, or its state is that of "
            "each rank. Use as many ranks and the same batch size"
        )
    if choice == "keep" and then.items_of_all != now.items_of_all:
        return (
            f"{ranks}; {here} would take {now.items_of_all} where it took {then.items_of_all} at once. Use the same batch in "
            "all, or let it change: Trainer(resume_batch='scale')"
        )
    return None


def _amount(value: Any, noun: str) -> str:
    if isinstance(value, str):
        return value
    return "an unknown number" if value is None else counted(value, noun)


def go_on(loader: PreparedLoader, then: Position, now: Position, progress: Progress) -> None:
    """Let the loader begin where the checkpoint's epoch stood, and count its batches in those of this run."""
    if then.items_done is None or now.items_done is None:
        return
    if then.length is not None and progress.batch_idx >= then.length:
        length = loader.length
        batches = progress.batch_idx if length is None or then.items_of_all == now.items_of_all else length
        loader.begin_at(Place(progress.epoch, batches, then.items_done, ended=True))
    else:
        batches = then.items_done // now.items_of_all
        loader.begin_at(Place(progress.epoch, batches, then.items_done))
    progress.batch_idx = batches
    progress.batches_since_validation = progress.batches_since_validation * then.items_of_all // now.items_of_all
