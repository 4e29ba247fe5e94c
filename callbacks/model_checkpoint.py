"""Save checkpoints while training, and keep the best or the newest."""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from .callback import Callback
from .monitor import check_mode, comes_later, fresh_value, is_better, last_value

if TYPE_CHECKING:
    from ..trainer import Task, Trainer

# What `filename` holds a value's place with: {name} or {name:format}.
_FIELD = r"\{([^}:]+)(:[^}]*)?\}"
_LINKS = ("best", "last")
_KINDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    str: "a string",
    os.PathLike: "a path",
    timedelta: "a timedelta, such as timedelta(minutes=30)",
    type(None): "None",
}


class _Kept(NamedTuple):
    """What a ModelCheckpoint has on the disk."""

    values: dict[str, float]
    """Paths of what is kept, with the monitored value, the oldest first."""
    last: str
    """The newest."""
    outlived: list[str]
    """What is kept no more, but may be there still: it is removed when all ranks know of the newest, or by the next run
    where this one ends before; or it is left because the run was resumed from it, or because it is the last finite one."""


class ModelCheckpoint(Callback):
    """Saves a checkpoint after every n-th epoch (default 1), step, or stretch of time, and keeps some.

    Saved after the validation that is due at the same step. With `monitor` also after a validation inside an
    epoch. A thread writes it while training goes on; what the callback tells is complete, and the same on every rank. When
    `fit` returns, all are complete.

    What is saved by epochs is judged by the value of that moment; an epoch without a validation is not saved, but as
    the last. What is saved by steps or time is judged by the newest value there is; before the first one it is
    kept as the worst, the newest of several such.

    Args:
        dirpath: folder of the checkpoints; default: `checkpoints` in the run's folder.
        filename: name of a checkpoint's folder, with metrics: "{epoch}-{val/acc:.3f}" gives
            "epoch=3-val_acc=0.981", or "nan" for a value that is not there yet. Default: "step-00000500". A name that
            is taken gets "-v1" behind it. "best" and "last" are the names of the links.
        monitor: metric by which the best are kept; None: the newest.
        verbose: say what is saved.
        save_last: always save, and let the link `last` in the folder lead to the newest.
        save_top_k: how many to keep; -1: all, 0: none (but the last, with `save_last`).
        save_weights_only: leave out what a resume needs.
        mode: "min" or "max": which value of `monitor` is better. NaN and infinities are the worst.
        auto_insert_metric_name: False: "{epoch}" in `filename` gives "3" instead of "epoch=3".
        every_n_train_steps: save after every n-th optimizer step.
        train_time_interval: save when so much time has passed, on all ranks at the same step.
        every_n_epochs: save after every n-th epoch. At most one of these three.
        save_on_train_epoch_end: True: not after a validation inside an epoch.
        asynchronous: training waits until the state is copied to the host's memory; a thread writes it. False: training
            waits until the checkpoint is on the disk.

    Raises:
        TypeError, ValueError: an argument is impossible, or two exclude each other.
    """

    monitors: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        asynchronous: bool = True,
    ) -> None:
        check_mode("ModelCheckpoint", mode)
        _check_types(
            {
                "dirpath": (dirpath, os.PathLike | str | None),
                "filename": (filename, str | None),
                "monitor": (monitor, str | None),
                "verbose": (verbose, bool),
                "save_last": (save_last, bool | None),
                "save_top_k": (save_top_k, int),
                "save_weights_only": (save_weights_only, bool),
                "auto_insert_metric_name": (auto_insert_metric_name, bool),
                "every_n_train_steps": (every_n_train_steps, int | None),
                "train_time_interval": (train_time_interval, timedelta | None),
                "every_n_epochs": (every_n_epochs, int | None),
                "save_on_train_epoch_end": (save_on_train_epoch_end, bool | None),
                "asynchronous": (asynchronous, bool),
            }
        )
        given = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise ValueError(
                f"ModelCheckpoint has {' and '.join(given)}: expected one of them; use one callback for each."
            )
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = given.get(name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"ModelCheckpoint({name}={value!r}): expected a whole number of 1 or more.")
        if train_time_interval is not None and train_time_interval <= timedelta(0):
            raise ValueError(f"ModelCheckpoint(train_time_interval={train_time_interval}): expected more than 0.")
        if save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={save_top_k}): expected -1 (all), 0, or more.")
        if save_top_k > 1 and monitor is None:
            raise ValueError(
                f"ModelCheckpoint(save_top_k={save_top_k}) without monitor: there is no best. Name a metric, or use -1, 0 or 1."
            )
        if filename is not None:
            _check_filename(filename)
        if dirpath == "":
            raise ValueError("ModelCheckpoint(dirpath=''): expected a folder, '.' for the present one, or None.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.filename, self.monitor, self.verbose, self.mode = filename, monitor, verbose, mode
        self.save_last, self.save_top_k, self.save_weights_only = bool(save_last), save_top_k, save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, train_time_interval
        self.every_n_epochs = every_n_epochs if given else 1
        self.save_on_train_epoch_end, self.asynchronous = save_on_train_epoch_end, asynchronous
        self._complete = self._planned = _Kept({}, "", [])
        self._last_step = -1
        self._saved_at = time.monotonic()
        self._validated = False  # in this step

    # --- what it knows ---------------------------------------------------------------------

    @property
    def kept(self) -> dict[str, float]:
        """Paths of what is kept, with the monitored value (NaN without a monitor), the oldest first.

        Like all that is told here, it is the same on all ranks, and on the disk: one that is being written is not in it.
        """
        return self._complete.values

    @property
    def last_path(self) -> str:
        """The newest checkpoint that is complete. Empty before the first."""
        return self._complete.last

    @property
    def best_model_path(self) -> str:
        """The best checkpoint that is kept; without a monitor, the newest. Empty before the first."""
        return self._ranked(self.kept)[0] if self.kept else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """The best checkpoint's monitored value, a float64 scalar."""
        return (
            torch.tensor(self.kept[self.best_model_path], dtype=torch.float64) if self.kept and self.monitor else None
        )

    @property
    def kth_best_model_path(self) -> str:
        """The worst checkpoint that is kept. Empty before the first."""
        return self._ranked(self.kept)[-1] if self.kept else ""

    @property
    def best_k_models(self) -> dict[str, float]:
        """As `kept`."""
        return self.kept

    @property
    def last_model_path(self) -> str:
        """As `last_path`."""
        return self.last_path

    def folder(self, trainer: Trainer) -> Path:
        """The folder of the checkpoints."""
        return self.dirpath or trainer.run_folder / "checkpoints"

    @property
    def state_key(self) -> str:
        """Distinct for what is saved when."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"every_n_train_steps={self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, "
            f"train_time_interval={self.train_time_interval})"
        )

    def state_dict(self) -> dict[str, Any]:
        """What is kept, the checkpoint that this is written into among it: it is read only if that one is complete."""
        values, last, outlived = self._planned
        return {"kept": dict(values), "last_path": last, "last_step": self._last_step, "outlived": list(outlived)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the checkpoints of the run before, as far as they still exist."""
        values = {path: value for path, value in state_dict["kept"].items() if Path(path).is_dir()}
        self._complete = self._planned = _Kept(values, state_dict["last_path"], list(state_dict.get("outlived", ())))
        self._last_step = state_dict["last_step"]

    # --- when it saves ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Settle the folder; the links must not be in anything's way."""
        if stage == "fit":
            self.dirpath = self.folder(trainer)
            self._planned = self._complete  # without what a failed fit had not completed
            for link, needed in zip(_LINKS, (self.monitor is not None, self.save_last), strict=True):
                if needed:
                    _check_link(self.dirpath / link)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Start the clock."""
        self._saved_at = time.monotonic()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Save after steps. At an epoch's last step its end saves, when the epoch is complete."""
        if self._validated:
            self._validated = False
            self._save(trainer)
        elif self.train_time_interval is not None:
            if trainer.timed_save_agreed and not trainer.is_last_batch:
                self._save(trainer)
            elif time.monotonic() - self._saved_at > self.train_time_interval.total_seconds():
                trainer.request_timed_save()
        elif self.every_n_train_steps is not None and self._step_is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Save after a validation inside an epoch, where its metric decides: when the step it belongs to is over."""
        inside = trainer.fitting and not trainer.sanity_checking and not trainer.epoch_is_over
        if inside and self.every_n_epochs and self.monitor and not self.save_on_train_epoch_end:
            self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Save after epochs, and after steps that ended one."""
        epoch_is_due = self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        time_is_over = self.train_time_interval is not None and trainer.timed_save_agreed and trainer.is_last_batch
        if epoch_is_due or time_is_over or self._step_is_due(trainer):
            self._save(trainer)

    def _step_is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_train_steps
        return bool(every) and trainer.global_step % every == 0 and trainer.global_step != self._last_step

    # --- saving and keeping ----------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        value = self._value(trainer)
        top = value is not None and self._is_among_best(value)
        self._last_step, self._saved_at = trainer.global_step, time.monotonic()
        if not top and not self.save_last:
            return
        trainer.checkpoint_writer.make_way()  # behind it, what is planned is on the disk
        name = self.format_checkpoint_name(trainer)
        path = trainer.strategy.broadcast(self._claimed_path(trainer, name), name="checkpoint path")
        planned = self._planned = self._plan(path, value if top else None)
        said = f"ModelCheckpoint: step {trainer.global_step} saved in {path}"
        if self.monitor and value is not None:
            said += f" ({self.monitor} {value:.6g})"

        def committed() -> None:
            if self.monitor and planned.values:
                _link(Path(path).parent / "best", self._ranked(planned.values)[0])
            if self.save_last:
                _link(Path(path).parent / "last", path)

        def settled() -> None:
            self._complete = planned
            if self.verbose:
                trainer.print(f"{said}.")

        def retire() -> None:
            if trainer.is_global_zero:
                trainer.remove_checkpoints(planned.outlived, [*planned.values, path], self.monitor)

        trainer.start_checkpoint(
            path,
            self.save_weights_only,
            committed=committed,
            settled=settled,
            retire=retire,
            background=self.asynchronous,
        )

    def _plan(self, path: str, value: float | None) -> _Kept:
        """What is kept when the checkpoint `path` is complete."""
        values, last, outlived = self._complete
        values = dict(values) if value is None else {**values, path: value}
        dropped = [*outlived, *(self._ranked(values)[self.save_top_k :] if self.save_top_k >= 0 else ())]
        for old in dropped:
            values.pop(old, None)
        if last and self.save_last and last not in values:
            dropped.append(last)
        # A resumed run ranks the checkpoints of another folder, but leaves them where they are.
        dropped = [old for old in dict.fromkeys(dropped) if old != path and _beside(old, path) and Path(old).is_dir()]
        return _Kept(values, path, dropped)

    def save_to_resume(self, trainer: Trainer) -> str:
        """Save what a resume needs, whatever is due, because the run ends here; return its path. All ranks call it.

        It is the last checkpoint, and not one of those to be kept: the run that goes on from it leaves it, the next one
        removes it.
        """
        trainer.checkpoint_writer.make_way()  # behind it, what is planned is on the disk
        name = f"step-{trainer.global_step:08d}"
        path = trainer.strategy.broadcast(self._claimed_path(trainer, name), name="checkpoint path")
        values, _, outlived = self._complete
        self._complete = self._planned = _Kept(values, path, [*outlived, path])
        self._last_step = trainer.global_step
        trainer.save_checkpoint(path)
        if trainer.is_global_zero and self.save_last:
            _link(Path(path).parent / "last", path)
        return path

    def _value(self, trainer: Trainer) -> float | None:
        """What this moment's checkpoint is judged by; NaN: it is the worst; None: it is none of those to be kept."""
        if self.monitor is None:
            return math.nan
        if self.every_n_epochs:
            return fresh_value(self, trainer, self.monitor)
        return last_value(self, trainer, self.monitor, by_steps=self.every_n_train_steps is not None)

    def _is_among_best(self, value: float) -> bool:
        kept = self._planned.values
        if self.save_top_k in (0, -1) or self.monitor is None or len(kept) < self.save_top_k:
            return self.save_top_k != 0
        worst = kept[self._ranked(kept)[self.save_top_k - 1]]
        newer = not math.isfinite(value) and not math.isfinite(worst)
        return newer or is_better(value, worst, self.mode)

    def _ranked(self, kept: Mapping[str, float]) -> list[str]:
        """The paths, the best first; of equals the older first, of those without a finite value the newer."""
        paths = list(kept)
        if self.monitor is None:
            return paths[::-1]
        judged = [path for path in paths if math.isfinite(kept[path])]
        unjudged = [path for path in reversed(paths) if not math.isfinite(kept[path])]
        return sorted(judged, key=kept.__getitem__, reverse=self.mode == "max") + unjudged

    def _claimed_path(self, trainer: Trainer, name: str) -> str:
        """A path that no other checkpoint has or is getting; empty on other ranks than 0."""
        if not trainer.is_global_zero:
            return ""
        folder, version = self.folder(trainer), 0
        path = folder / name
        while not trainer.claim_checkpoint(path):
            version += 1
            path = folder / f"{name}-v{version}"
        return str(path)

    def format_checkpoint_name(self, trainer: Trainer) -> str:
        """The name for the present step; a `/` in a metric's name becomes `_`.

        Raises:
            KeyError: `filename` names a metric that was not logged.
        """
        if self.filename is None:
            return f"step-{trainer.global_step:08d}"
        values: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}

        def fill(match: re.Match[str]) -> str:
            name, form = match.group(1), match.group(2) or ""
            if name not in values and not comes_later(trainer, name):
                raise KeyError(f"ModelCheckpoint's filename has {{{name}}}, expected one of {', '.join(values)}.")
            text = format(values.get(name, math.nan), form[1:])
            return f"{name.replace('/', '_')}={text}" if self.auto_insert_metric_name else text

        return re.sub(_FIELD, fill, self.filename)


def _check_types(arguments: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, expected) in arguments.items():
        kinds = get_args(expected) or (expected,)
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in kinds):  # a bool is an int
            names = " or ".join(_KINDS[kind] for kind in kinds)
            raise TypeError(f"ModelCheckpoint({name}={value!r}): expected {names}.")


def _check_filename(name: str) -> None:
    """Refuse names that the links have, and folders in which no checkpoint would be found again."""
    plain = re.sub(_FIELD, "0", name)
    if plain in ("", *_LINKS) or plain.startswith(".") or Path(plain).name != plain:
        raise ValueError(
            f"ModelCheckpoint(filename={name!r}): expected the name of a folder, without '/' and not hidden; 'best' and "
            "'last' are the links beside the checkpoints. Leave it out for 'step-00000500', or use "
            "'{epoch}-{step}'; another folder is dirpath's."
        )


def _beside(path: str, other: str) -> bool:
    mine, theirs = Path(path).parent, Path(other).parent
    return mine == theirs or mine.resolve() == theirs.resolve()


def _check_link(link: Path) -> None:
    """Refuse to replace anything but a link.

    Raises:
        FileExistsError: there is something else of that name.
    """
    if link.exists() and not link.is_symlink():
        raise FileExistsError(
            f"{link} is there and no link: ModelCheckpoint lets a link of this name lead to a checkpoint. Rename it, or "
            "choose another dirpath."
        )


def _link(link: Path, target: str) -> None:
    """Let a symbolic link lead to a checkpoint beside it; it never leads nowhere in between."""
    _check_link(link)
    beside = link.with_name(f".{link.name}.{secrets.token_hex(4)}")  # two runs may do so at the same time
    beside.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    beside.replace(link)
