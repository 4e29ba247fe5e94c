"""What takes part in the user's program: notes every step, saves checkpoints, and kills its own process where it is told.

A Trainer adds it where the environment names a plan; see `join`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ...callbacks.callback import Callback
from ...callbacks.logger import Logger, SilentLogger
from ...callbacks.model_checkpoint import ModelCheckpoint
from ..randomness import rng_state
from .digest import digest

if TYPE_CHECKING:
    from ..task import Task
    from ..trainer import Trainer

VARIABLE = "SAMESTEP_VERIFY_RESUME"
"""Names the file with the plan."""

PLACES = ("on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_train_step_end")
"""Hooks in which a process can be killed."""

# Bytes of tensors of a rank and step up to which they are kept, so that a difference can be measured.
_SMALL = 32 << 20


@dataclass(frozen=True)
class Plan:
    """What one start of the program is to do."""

    folder: str
    """Of the whole check."""
    start: str
    """The name of this start: a folder in it for what it notes."""
    steps: int
    """Optimizer steps that the first start takes."""
    until: int | None = None
    """The optimizer step at which the program ends; None: it is the first start."""
    checkpoint: str | None = None
    """To go on from; None: as the program says."""
    save_every: int = 3
    kill_rank: int = 0
    kill_step: int | None = None
    """The process of `kill_rank` kills itself in the step behind this one; None: nobody does."""
    kill_place: str = PLACES[0]

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: str) -> Plan:
        """What `write` wrote."""
        return cls(**json.loads(Path(path).read_text("utf-8")))

    @property
    def notes(self) -> Path:
        """Where this start's ranks write."""
        return Path(self.folder) / self.start


_joined = False


def join(trainer: Trainer, path: str, ckpt_path: Any) -> Any:
    """Let the program's first fit follow the plan. Return the checkpoint it goes on from.

    Loggers and ModelCheckpoints are left out, so that nothing is written where the user's runs are.
    """
    global _joined
    if _joined:
        return ckpt_path
    _joined = True
    plan = Plan.read(path)
    trainer.run_folder = Path(plan.folder) / "run"
    kept = [callback for callback in trainer.callbacks if not isinstance(callback, (Logger, ModelCheckpoint))]
    trainer.callbacks = [SilentLogger(), *kept, Probe(plan)]
    if plan.checkpoint is not None:
        return plan.checkpoint
    return None if ckpt_path in ("auto", "best", "last") else ckpt_path


class Probe(Callback):
    """Notes, saves and kills. Its hooks run last."""

    monitors: ClassVar[bool] = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._until = -1 if plan.until is None else plan.until
        self._saved: list[Path] = []

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Begin the notes; the first start saves what all others can begin from."""
        plan = self.plan
        plan.notes.mkdir(parents=True, exist_ok=True)
        self._file = open(plan.notes / f"rank-{trainer.global_rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._note("start", step=trainer.global_step, ranks=trainer.world_size)
        if plan.until is None:
            self._until = trainer.global_step + plan.steps
            trainer.save_checkpoint(Path(plan.folder) / "checkpoints" / "start")
        elif trainer.global_step >= self._until:  # it died in the last step, behind the checkpoint
            self._leave(trainer)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """Note what a micro-batch begins with."""
        self._kill(trainer, "on_train_batch_start")
        values = {"the batch": digest(batch)}
        for name, state in rng_state().items():
            values[f"the random numbers of {name}"] = digest(state)
        self._note("begin", place=self._place(trainer, batch_idx), values=values)

    def on_after_backward(self, trainer: Trainer, task: Task) -> None:
        """Perhaps die."""
        self._kill(trainer, "on_after_backward")

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what it came to."""
        self._kill(trainer, "on_train_batch_end")
        loss: Any = outputs.get("loss") if isinstance(outputs, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        shown = repr(float(loss)) if isinstance(loss, Tensor) and loss.numel() == 1 else digest(outputs)
        self._note("end", place=self._place(trainer, batch_idx), values={"the loss": shown})

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Note all that has a state; save; end the program where the plan ends."""
        values, tensors = states(trainer, task)
        self._note("step", place=self._place(trainer, trainer.progress.batch_idx - 1), values=values)
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= _SMALL:
            torch.save(tensors, self.plan.notes / f"rank-{trainer.global_rank}-step-{trainer.global_step}.pt")
        if trainer.global_step % self.plan.save_every == 0:
            self._save(trainer)
        self._kill(trainer, "on_train_step_end")
        if trainer.global_step >= self._until:
            self._leave(trainer)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """The fit was shorter than the plan."""
        self._leave(trainer)

    @staticmethod
    def _place(trainer: Trainer, batch_idx: int) -> list[int]:
        return [trainer.current_epoch, batch_idx, trainer.global_step]

    def _note(self, kind: str, **what: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **what}) + "\n")
        self._file.flush()  # a killed process loses nothing that the system has

    def _save(self, trainer: Trainer) -> None:
        # Saving makes buffers equal on all ranks, so the uninterrupted run must save at the same steps.
        first = self.plan.until is None
        folder = Path(self.plan.folder) / ("thrown away" if first else "checkpoints")
        path = folder / f"{self.plan.start}-step-{trainer.global_step:08d}"
        trainer.save_checkpoint(path)
        self._saved.append(path)
        if trainer.is_global_zero and len(self._saved) > 2:
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)

    def _kill(self, trainer: Trainer, place: str) -> None:
        plan = self.plan
        if plan.kill_step is None or plan.kill_place != place or plan.kill_rank != trainer.global_rank:
            return
        done = trainer.global_step if place in PLACES[:2] else trainer.global_step - 1
        if done >= plan.kill_step:
            self._note("killed", step=trainer.global_step, hook=place)
            os.kill(os.getpid(), signal.SIGKILL)

    def _leave(self, trainer: Trainer) -> NoReturn:
        """End the program here: what comes behind the fit is not what is checked."""
        trainer.strategy.barrier(name="end of verify-resume")
        self._note("done", step=trainer.global_step)
        os._exit(0)


def states(trainer: Trainer, task: Task) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Digests of all that a step changes, by what it is called; and the tensors among it."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for name, parameter in task.named_parameters():
        tensors[f"parameter {name}"] = parameter.detach().cpu()
        names[id(parameter)] = name
    for name, buffer in task.named_buffers():
        tensors[f"buffer {name}"] = buffer.detach().cpu()
    values: dict[str, str] = {}
    for index, optimizer in enumerate(trainer.optimizers):
        which = f"optimizer {index}'s " if len(trainer.optimizers) > 1 else "the optimizer's "
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    name = f"{which}{key} of {names.get(id(parameter), 'a parameter')}"
                    if isinstance(value, Tensor):
                        tensors[name] = value.detach().cpu()
                    else:
                        values[name] = digest(value)
        values[f"{which}options"] = digest(
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        )
    values = {name: digest(tensor) for name, tensor in tensors.items()} | values
    for index, config in enumerate(trainer.lr_scheduler_configs):
        values[f"LR scheduler {index}"] = digest(config.scheduler.state_dict())
    values["the strategy's state"] = digest([trainer.strategy.state_dict(), trainer.strategy.rank_state_dict()])
    for callback in trainer.callbacks:
        if not isinstance(callback, Probe):
            values[f"the state of {callback.state_key}"] = digest(callback.state_dict())
    for name, value in sorted(trainer.callback_metrics.items()):
        values[f"metric {name}"] = repr(float(value))
    return values, {name: tensor.clone() for name, tensor in tensors.items()}
