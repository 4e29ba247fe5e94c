"""Faults on demand, to see how a program ends and goes on: `SAMESTEP_CHAOS="kill rank=1 step=7"`.

A Trainer that finds the variable adds this callback. Without it nothing of this is loaded or runs.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .callback import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from ..trainer import Task, Trainer

VARIABLE = "SAMESTEP_CHAOS"

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("SIGKILL", ("to",)),
    "term": ("SIGTERM", ("to",)),
    "int": ("SIGINT", ("to",)),
    "usr1": ("SIGUSR1", ("to",)),
    "stop": ("SIGSTOP: the process stands still", ()),
    "exit": ("os._exit(code), without a word", ("code",)),
    "quit": ("sys.exit(code)", ("code",)),
    "stall": ("sleep, for an hour or `seconds`", ("seconds",)),
    "spin": ("a loop without end", ()),
    "raise": ("RuntimeError", ()),
    "nan": ("the gradients of a backward become NaN", ()),
    "oom": ("memory runs out in a backward", ()),
    "slow-disk": ("every file takes `seconds` (1) longer to be written", ("seconds",)),
    "full-disk": ("no file can be written any more", ()),
    "damage": ("`how` flip (a bit) or truncate: the newest checkpoint", ("how",)),
}
"""Each kind of fault: what it does, and the options that only it takes."""

PHASES = ("setup", "loading", "sanity", "training", "backward", "validation", "saving", "writing", "end")
"""Where a fault may happen: `saving` is before a checkpoint is written, `writing` while it is."""

_DEFAULT_PHASE = {"nan": "backward", "oom": "backward", "slow-disk": "writing", "full-disk": "writing"}
_SIGNALS = {"kill": "SIGKILL", "term": "SIGTERM", "int": "SIGINT", "usr1": "SIGUSR1", "stop": "SIGSTOP"}


@dataclass
class Fault:
    """One fault, and where it happens: once, on the ranks named, the first time that they come there."""

    kind: str
    rank: int | None = None
    """None: on all ranks."""
    step: int = 0
    """Not before so many optimizer steps are done."""
    phase: str = "training"
    restart: int | None = 0
    """Only when torchrun has restarted the job so many times; None: every time."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `kind name=value …`, as "kill rank=1 step=7 phase=validation restart=0".

        Raises:
            ValueError: names what was received and what is expected.
        """
        kind, *words = text.split() or [""]
        if kind not in KINDS:
            raise ValueError(f"no fault {kind!r}: expected one of {', '.join(KINDS)}.")
        given: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            allowed = ("rank", "step", "phase", "restart", *KINDS[kind][1])
            if not equals or name not in allowed:
                raise ValueError(f"{word!r} in the fault {text!r}: expected name=value with {', '.join(allowed)}.")
            given[name] = value
        phase = given.pop("phase", _DEFAULT_PHASE.get(kind, "training"))
        if phase not in PHASES or phase != _DEFAULT_PHASE.get(kind, phase):
            raise ValueError(
                f"phase={phase} in the fault {text!r}: expected {_DEFAULT_PHASE.get(kind, ', '.join(PHASES))}."
            )
        rank, step = _number(given, "rank", "all"), _number(given, "step", "0")
        restart = _number(given, "restart", "0")
        fault = cls(kind, rank, step or 0, phase, restart, given)
        fault.check(text)
        return fault

    def check(self, text: str) -> None:
        """Refuse options that have no such value."""
        allowed = {"to": ("rank", "launcher"), "how": ("flip", "truncate")}
        for name, value in self.options.items():
            number = value.replace(".", "", 1).isdecimal() if name == "seconds" else value.isdecimal()
            if value not in allowed[name] if name in allowed else not number:
                expected = " or ".join(allowed.get(name, ("a number",)))
                raise ValueError(f"{name}={value} in the fault {text!r}: expected {expected}.")

    @property
    def lasts(self) -> bool:
        """Whether it goes on from its moment on."""
        return self.kind in ("slow-disk", "full-disk")


def parse_faults(text: str) -> list[Fault]:
    """Read faults, separated by `;`.

    Raises:
        ValueError: one is wrong, or there is none.
    """
    faults = [Fault.parse(part) for part in text.split(";") if part.strip()]
    if not faults:
        raise ValueError(f"{text!r} holds no fault: expected such as 'kill rank=1 step=7'.")
    return faults


class Chaos(Callback):
    """Makes faults happen.

    Args:
        faults: as `parse_faults` reads them.

    Raises:
        ValueError: they can't be read.
    """

    def __init__(self, faults: str) -> None:
        self.to_come = parse_faults(faults)
        self._trainer: Trainer | None = None
        self._fsync: Callable[[Any], None] | None = None
        self._saved: int | None = None  # the step of the newest checkpoint

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Choose the faults of this rank and restart. Writing is seen by its last step, which asks the disk."""
        restart, rank = trainer.strategy.environment.restart, trainer.global_rank
        self.to_come = [f for f in self.to_come if f.rank in (None, rank) and f.restart in (None, restart)]
        self._trainer = trainer
        if any(fault.phase == "writing" for fault in self.to_come):
            self._fsync, os.fsync = os.fsync, self._write
        if stage == "fit":
            self._come_to("setup")

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """The disk works again."""
        if self._fsync is not None:
            os.fsync, self._fsync = self._fsync, None

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """A phase."""
        self._come_to("loading")

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """A phase."""
        self._come_to("training")

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        """The fault comes from inside the backward, before gradients are reduced."""
        if any(fault.phase == "backward" and fault.step <= trainer.global_step for fault in self.to_come):
            loss.register_hook(self._backward)

    def on_validation_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Two phases."""
        self._come_to("sanity" if trainer.sanity_checking else "validation")

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """A phase."""
        self._saved = trainer.global_step
        self._come_to("saving")

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """A phase."""
        self._come_to("end")

    # --- what happens ----------------------------------------------------------------------

    def _come_to(self, phase: str) -> list[Fault]:
        assert self._trainer is not None
        step = self._trainer.global_step
        if phase == "writing" and self._saved is not None:
            step = self._saved  # of what a thread writes, while training may be further on
        due = [fault for fault in self.to_come if fault.phase == phase and fault.step <= step]
        for fault in due:
            if not fault.lasts:
                self.to_come.remove(fault)
            if fault.kind not in ("nan", "oom"):
                self._happen(fault)
        return due

    def _backward(self, gradient: Tensor) -> Tensor | None:
        for fault in self._come_to("backward"):
            if fault.kind == "nan":
                return gradient * float("nan")
            if fault.kind == "oom":
                torch.empty(1 << 60, dtype=torch.uint8, device=gradient.device)
        return None

    def _write(self, descriptor: Any) -> None:
        self._come_to("writing")
        assert self._fsync is not None
        self._fsync(descriptor)

    def _happen(self, fault: Fault) -> None:
        assert self._trainer is not None
        kind, options = fault.kind, fault.options
        if not fault.lasts:
            place = f"rank {self._trainer.global_rank}, {fault.phase}, step {self._trainer.global_step}"
            print(f"samestep chaos: {kind} on {place}", file=sys.stderr, flush=True)
        if kind in _SIGNALS:
            process = os.getppid() if options.get("to") == "launcher" else os.getpid()
            os.kill(process, getattr(signal, _SIGNALS[kind]))
        elif kind == "exit":
            os._exit(int(options.get("code", "1")))
        elif kind == "quit":
            sys.exit(int(options.get("code", "1")))
        elif kind == "stall":
            time.sleep(float(options.get("seconds", "3600")))
        elif kind == "spin":
            while True:
                pass
        elif kind == "raise":
            raise RuntimeError(f"chaos on rank {self._trainer.global_rank}")
        elif kind == "slow-disk":
            time.sleep(float(options.get("seconds", "1")))
        elif kind == "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif kind == "damage":
            self._damage(options.get("how", "flip"))

    def _damage(self, how: str) -> None:
        assert self._trainer is not None
        folders = [callback.folder(self._trainer) for callback in self._trainer.checkpoint_callbacks]
        weights = [file for folder in folders for file in folder.glob("[!.]*/model.safetensors")]
        if weights:
            damage(max(weights, key=lambda file: file.stat().st_mtime_ns), how)


def damage(file: Path, how: str) -> None:
    """Damage a file: `flip` a bit in its middle, or `truncate` it to its half."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if how == "truncate":
        del content[middle:]
    else:
        content[middle] ^= 1
    file.write_bytes(content)


def _number(given: dict[str, str], name: str, default: str) -> int | None:
    """Take a number out; None for "all" and "any"."""
    text = given.pop(name, default)
    if text in ("all", "any") and name != "step":
        return None
    if not text.isdecimal():
        raise ValueError(f"{name}={text}: expected a whole number{' or any' if name == 'restart' else ''}.")
    return int(text)
