"""Going on from a checkpoint: what a fit takes back of it, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, read_rank_state
from .checkpoint.state import restore
from .metrics.merging import merge, nothing_of, part_of, unmergeable, without
from .randomness import derived_seed, seed_everything, set_rng_state

if TYPE_CHECKING:
    from .loop import TrainingLoop
    from .trainer import Trainer
    from .validation_schedule import ValidationSchedule


class Resumption:
    """A checkpoint, given back to a fit in three parts: before its loop is built, before it trains, and in its first epoch.

    It is let go after the second: it is as large as the model with its optimizers.
    """

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        self._trainer, self._checkpoint = trainer, checkpoint
        self._rank_state = read_rank_state(checkpoint, trainer.global_rank)
        """What the checkpoint has of this rank alone, until that is taken up."""
        self._former_ranks: int = checkpoint.manifest["world_size"]
        self._other_ranks = self._former_ranks != trainer.world_size
        self._logged = self._logged_before(checkpoint)
        """What was logged so far in the epoch by the ranks whose sums go on as this one's."""
        if self._rank_state is not None and self._other_ranks:  # the rest is one of as many parts as there were ranks
            self._rank_state = {key: value for key, value in self._rank_state.items() if key in ("rng", "strategy")}
        self._taken_up = False

    def _logged_before(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        part = part_of(self._former_ranks, self._trainer.global_rank, self._trainer.world_size)
        told = [self._rank_state]
        if self._other_ranks:
            told = [read_rank_state(checkpoint, rank) for rank in part or [0]]
        states = [state["metrics"] for state in told if state is not None and "metrics" in state]
        return states if part else [nothing_of(state) for state in states]

    def restore(self, validations: ValidationSchedule) -> None:
        """Give back weights, optimizers, schedulers, callbacks, counters, and the place in the data.

        Raises:
            CheckpointError: it does not fit the task, its optimizers, or the number of ranks.
        """
        trainer = self._trainer
        restore(trainer, self._checkpoint, training=True, rank_state=self._rank_state)
        if self._other_ranks:
            validations.count_anew(self._checkpoint.training["progress"].get("batches_since_validation", 0))
        if trainer.global_step:  # else torch warns of a scheduler that moves before its optimizer has stepped
            for optimizer in trainer.optimizers:
                optimizer._opt_called = True  # pyright: ignore

    def restore_loop(self, loop: TrainingLoop) -> None:
        """Give loop and strategy back what the next step depends on."""
        trainer = self._trainer
        if "loop" in self._checkpoint.training:
            loop.load_state_dict(self._checkpoint.training["loop"])
        del self._checkpoint
        if self._rank_state is None:  # on more ranks than before, the new ones have numbers of their own
            seed_everything(derived_seed(trainer.seed, trainer.global_rank, "rank", trainer.global_step))
        else:
            trainer.strategy.load_rank_state_dict(self._rank_state.get("strategy", {}))

    def take_up(self, loop: TrainingLoop) -> None:
        """Go on with the random numbers, and with what was logged so far in the epoch; the first time only.

        Behind the hooks that run once more, which may draw and log: `on_train_start`, and inside an epoch
        `on_train_epoch_start`. There, the loader has begun before, which draws, too.
        """
        if self._taken_up:
            return
        self._taken_up = True
        if self._rank_state is not None:
            set_rng_state(self._rank_state["rng"])
        if self._logged:  # else it is a checkpoint that has none
            self._take_up_logged(loop)
        self._rank_state, self._logged = None, []

    def _take_up_logged(self, loop: TrainingLoop) -> None:
        trainer = self._trainer
        left_out = unmergeable(self._logged, trainer.task) if trainer.world_size < self._former_ranks else []
        loop.load_metrics_state_dict(merge([without(state, left_out) for state in self._logged], trainer.task))
        if left_out:
            trainer.print(
                f"on fewer ranks: torchmetrics' {', '.join(map(repr, left_out))} can't put the sums of several ranks together "
                "before it is computed; in this epoch it covers the batches after the resume only"
            )
