"""Go back to the last good state when the loss jumps, and leave out the samples that did it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from .callback import Callback
from .monitor import fresh_value
from .wording import counted

if TYPE_CHECKING:
    from ..trainer import Task, Trainer

# Values before which none is judged.
_FEWEST = 5
# The median absolute deviation of a normal distribution, times this, is its standard deviation.
_DEVIATIONS = 1.4826


class LossSpikeRollback(Callback):
    """Watches a logged training loss; when it jumps, parameters and optimizers go back to the last good state.

    The samples since then are left out: the position in the data stays. So the run goes on as one that was never given
    the batches from the good state to the jump: parameters, optimizers, schedulers, `global_step`, random numbers and
    the states of callbacks such as an average of the parameters are those of that run. What was logged and saved stays.

    The value is judged where it is logged and reduced (`log_every_n_steps`), so all ranks decide alike, and nothing more is
    communicated. A jump is a value that is not finite, or above the median of the last values by more than `threshold`
    standard deviations, which are taken from the median absolute deviation: a former jump does not hide the next one.
    A state is good when the loss that is made with it has not jumped, so until then there are two copies.

    A checkpoint holds the good state, too, so that a resumed run goes back exactly as the run that was never stopped. It is
    larger by that: by another copy of parameters and optimizers, or two. On another number of ranks, the state at the resume is
    the first good one.

    Args:
        monitor: a loss of training, logged in every step and reduced over the ranks.
        threshold: standard deviations above the median.
        window: how many good values the median is taken of.
        patience: values in a row that must have jumped.
        every_n_train_steps: about how often the good state is copied, to the CPU's memory.
        max_rollbacks: how often the run may go back; then it ends as diverged.

    Raises:
        ValueError: an argument is impossible.
    """

    keeps_state_in_rollback: ClassVar[bool] = True

    def __init__(
        self,
        monitor: str,
        threshold: float = 10.0,
        window: int = 50,
        patience: int = 1,
        every_n_train_steps: int = 100,
        max_rollbacks: int = 3,
    ) -> None:
        for name, value, least in (
            ("threshold", threshold, 1), ("window", window, _FEWEST), ("patience", patience, 1),
            ("every_n_train_steps", every_n_train_steps, 1), ("max_rollbacks", max_rollbacks, 0),
        ):  # fmt: skip
            if not value >= least:
                raise ValueError(f"LossSpikeRollback({name}={value!r}): expected {least} or more.")
        self.monitor, self.threshold, self.window, self.patience = monitor, threshold, window, patience
        self.every_n_train_steps, self.max_rollbacks = every_n_train_steps, max_rollbacks
        self.rollbacks = 0
        """How often the run has gone back."""
        self.spikes = 0
        """Values in a row that have jumped."""
        self._values: list[float] = []
        self._judged = -1
        self._good: Any = None
        self._candidate: Any = None  # good as soon as a loss that was made with its parameters is
        self._goes_on = False  # with the good state of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The values that the next one is compared with, the good state, and how often the run has gone back."""
        state: dict[str, Any] = {"values": list(self._values), "rollbacks": self.rollbacks}
        if self._good is not None:
            state |= {"spikes": self.spikes, "judged": self._judged, "good": _shared(self._good)}
            state["candidate"] = None if self._candidate is None else _shared(self._candidate)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with them."""
        self._values, self.rollbacks = list(state_dict["values"]), state_dict["rollbacks"]
        if "good" in state_dict:
            self.spikes, self._judged = state_dict["spikes"], state_dict["judged"]
            self._good = {**(self._good or {}), **state_dict["good"]}
            candidate = state_dict.get("candidate")
            # What is this rank's alone comes with its own state; in a running fit, it is there.
            self._candidate = None if candidate is None else {**self._good, **(self._candidate or {}), **candidate}

    def rank_state_dict(self) -> dict[str, Any]:
        """What of the good state is this rank's alone."""
        if self._good is None:
            return {}
        return {"good": self._good["rank"], "candidate": None if self._candidate is None else self._candidate["rank"]}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """With it, the good state is whole."""
        self._good, self._goes_on = {**self._good, "rank": state_dict["good"]}, True
        if self._candidate is not None:
            self._candidate = {**self._candidate, "rank": state_dict["candidate"]}

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """The first good state is the one that training starts with, or that of the checkpoint."""
        if not self._goes_on:
            self._good, self._judged, self.spikes = trainer.take_snapshot(), trainer.global_step, 0
            self._candidate = None
        self._goes_on = False

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Judge the loss, where it was reduced at this step."""
        step = trainer.global_step
        if step == self._judged or step % trainer.config.log_every_n_steps:
            return
        value = fresh_value(self, trainer, self.monitor)
        if value is None:
            trainer.monitored(self.monitor, type(self).__name__)  # it is known, and was not logged in this step
            return
        self._judged = step
        if not self.is_spike(value):
            self.spikes = 0
            self._values = [*self._values, value][-self.window :]
            if self._candidate is not None:
                self._good, self._candidate = self._candidate, None
            if step >= self._good["step"] + self.every_n_train_steps:
                # The loss of this step is of the parameters before it: those it has made may be broken.
                self._candidate = trainer.take_snapshot()
            return
        self.spikes += 1
        if self.spikes >= self.patience:
            self._go_back(trainer, value)

    def is_spike(self, value: float) -> bool:
        """Whether a value jumps out of those before it."""
        if not math.isfinite(value):
            return True
        if len(self._values) < _FEWEST:
            return False
        middle = median(self._values)
        spread = _DEVIATIONS * median(abs(other - middle) for other in self._values)
        # Values that are all but equal have no spread to speak of: then a tenth of a per cent counts as one.
        return value > middle + self.threshold * max(spread, 1e-3 * abs(middle))

    def _go_back(self, trainer: Trainer, value: float) -> None:
        usual = f", of late {median(self._values):.6g}" if self._values else ""
        jumped = f"{self.monitor} jumped to {value:.6g} at step {trainer.global_step}{usual}"
        if self.rollbacks >= self.max_rollbacks:
            trainer.diverge(f"{jumped}, after {counted(self.rollbacks, 'rollback')}: expected no more of them")
        self.rollbacks += 1
        good: int = self._good["step"]
        left_out = trainer.global_step - good
        trainer.print(
            f"LossSpikeRollback: {jumped}. Back to step {good}; the samples of {counted(left_out, 'step')} are left "
            f"out (rollback {self.rollbacks} of {self.max_rollbacks})"
        )
        trainer.go_back(self._good)
        self._judged, self.spikes, self._candidate = trainer.global_step, 0, None


def _shared(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """What of a snapshot is the same on all ranks."""
    return {name: value for name, value in snapshot.items() if name != "rank"}
