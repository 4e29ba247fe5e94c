"""Save checkpoints while training, and keep the best or the newest."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .callback import Callback
from .monitor import check_mode, fresh_value, is_better

if TYPE_CHECKING:
    from ..trainer import Task, Trainer


class ModelCheckpoint(Callback):
    """Saves a checkpoint after every n-th epoch (default 1), step, or stretch of time, and keeps some.

    Saved after the validation that is due at the same step. With `monitor` also after a validation inside an
    epoch. When `fit` returns, the files are complete and every rank knows their paths.

    Args:
        dirpath: folder of the checkpoints; default: `checkpoints` in the run's folder.
        filename: name of a checkpoint's folder, with metrics: "{epoch}-{val/acc:.3f}" gives
            "epoch=3-val_acc=0.981". Default: "step-00000500". A name that is taken gets "-v1" behind it.
        monitor: metric by which the best are kept; None: the newest.
        verbose: say what is saved.
        save_last: always save, and let the link `last` in the folder lead to the newest.
        save_top_k: how many to keep; -1: all, 0: none (but the last, with `save_last`).
        save_weights_only: leave out what a resume needs.
        mode: "min" or "max": which value of `monitor` is better. NaN is the worst.
        auto_insert_metric_name: False: "{epoch}" in `filename` gives "3" instead of "epoch=3".
        every_n_train_steps: save after every n-th optimizer step.
        train_time_interval: save when so much time has passed, on all ranks at the same step.
        every_n_epochs: save after every n-th epoch. At most one of these three.
        save_on_train_epoch_end: True: not after a validation inside an epoch.
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
    ) -> None:
        check_mode("ModelCheckpoint", mode)
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
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"ModelCheckpoint({name}={value!r}): expected a whole number of 1 or more.")
        if train_time_interval is not None and train_time_interval <= timedelta(0):
            raise ValueError(f"ModelCheckpoint(train_time_interval={train_time_interval}): expected more than 0.")
        if save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={save_top_k}): expected -1 (all), 0, or more.")
        if save_top_k > 1 and monitor is None:
            raise ValueError(
                f"ModelCheckpoint(save_top_k={save_top_k}) without monitor: there is no best. Name a metric, or use -1, 0 or 1."
            )
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.filename, self.monitor, self.verbose, self.mode = filename, monitor, verbose, mode
        self.save_last, self.save_top_k, self.save_weights_only = bool(save_last), save_top_k, save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, train_time_interval
        self.every_n_epochs = every_n_epochs if given else 1
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.kept: dict[str, float] = {}
        """Paths that are kept, with the monitored value (NaN without a monitor), the oldest first."""
        self.last_path = ""
        """The newest checkpoint."""
        self._last_step = -1
        self._saved_at = time.monotonic()

    # --- what it knows ---------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The best checkpoint that is kept; without a monitor, the newest. Empty before the first."""
        return self._ranked()[0] if self.kept else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """The best checkpoint's monitored value, a float64 scalar."""
        return (
            torch.tensor(self.kept[self.best_model_path], dtype=torch.float64) if self.kept and self.monitor else None
        )

    @property
    def kth_best_model_path(self) -> str:
        """The worst checkpoint that is kept. Empty before the first."""
        return self._ranked()[-1] if self.kept else ""

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
        """What is kept, the checkpoint that this is written into among it."""
        return {"kept": dict(self.kept), "last_path": self.last_path, "last_step": self._last_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the checkpoints of the run before, as far as they still exist."""
        self.kept = {path: value for path, value in state_dict["kept"].items() if Path(path).is_dir()}
        self.last_path, self._last_step = state_dict["last_path"], state_dict["last_step"]

    # --- when it saves ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Settle the folder."""
        if stage == "fit":
            self.dirpath = self.folder(trainer)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Start the clock."""
        self._saved_at = time.monotonic()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Save after steps. At an epoch's last step its end saves, when the epoch is complete."""
        if self.train_time_interval is not None:
            if trainer.timed_save_agreed:
                self._save(trainer)
            elif time.monotonic() - self._saved_at > self.train_time_interval.total_seconds():
                trainer.request_timed_save()
        elif self._step_is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Save after a validation inside an epoch, where its metric decides."""
        inside = trainer.fitting and not trainer.sanity_checking and not trainer.epoch_is_over
        if inside and self.every_n_epochs and self.monitor and not self.save_on_train_epoch_end:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Save after epochs, and after steps that ended one."""
        if (self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0) or self._step_is_due(
            trainer
        ):
            self._save(trainer)

    def _step_is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_train_steps
        return bool(every) and trainer.global_step % every == 0 and trainer.global_step != self._last_step

    # --- saving and keeping ----------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        value = math.nan
        if self.monitor is not None:
            fresh = fresh_value(self, trainer, self.monitor)
            if fresh is None and not self.save_last:
                return  # no validation at this step: nothing to judge by
            value = math.nan if fresh is None else fresh
        top = self._is_among_best(value)
        self._last_step, self._saved_at = trainer.global_step, time.monotonic()
        if not top and not self.save_last:
            return
        path = trainer.strategy.broadcast(str(self._path(trainer)), name="checkpoint path")
        before = dict(self.kept), self.last_path
        if top:
            self.kept[path] = value
        former, self.last_path = self.last_path, path
        dropped = [p for p in self._ranked()[self.save_top_k :] if self.save_top_k >= 0]
        for old in dropped:
            del self.kept[old]
        if former and self.save_last and former not in self.kept:
            dropped.append(former)
        try:
            trainer.save_checkpoint(path, self.save_weights_only)
        except BaseException:
            self.kept, self.last_path = before
            raise
        if trainer.is_global_zero:
            if self.monitor and self.kept:
                _link(Path(path).parent / "best", self.best_model_path)
            if self.save_last:
                _link(Path(path).parent / "last", path)
            for old in dict.fromkeys(dropped):
                # A resumed run ranks the checkpoints of the run before, but leaves them where they are.
                if (
                    old not in (path, self.best_model_path)
                    and Path(old).parent.resolve() == Path(path).parent.resolve()
                ):
                    trainer.remove_checkpoint(old)
        if self.verbose:
            score = f" ({self.monitor} {value:.6g})" if self.monitor else ""
            trainer.print(f"ModelCheckpoint: step {trainer.global_step} saved in {path}{score}.")

    def _is_among_best(self, value: float) -> bool:
        if self.save_top_k == -1 or self.monitor is None or len(self.kept) < self.save_top_k:
            return self.save_top_k != 0
        return self.save_top_k > 0 and is_better(value, self.kept[self._ranked()[-1]], self.mode)

    def _ranked(self) -> list[str]:
        """Kept paths, the best first; of equals the older first. Without a monitor the newest first."""
        if self.monitor is None:
            return list(reversed(self.kept))
        worst = math.inf if self.mode == "min" else -math.inf

        def order(path: str) -> float:
            value = self.kept[path]
            value = worst if math.isnan(value) else value
            return value if self.mode == "min" else -value

        return sorted(self.kept, key=order)

    def _path(self, trainer: Trainer) -> Path:
        name = self.format_checkpoint_name(trainer)
        folder, path, version = self.folder(trainer), self.folder(trainer) / name, 0
        while path.exists():
            version += 1
            path = folder / f"{name}-v{version}"
        return path

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
            if name not in values:
                raise KeyError(f"ModelCheckpoint's filename has {{{name}}}, expected one of {', '.join(values)}.")
            text = format(values[name], form[1:])
            return f"{name.replace('/', '_')}={text}" if self.auto_insert_metric_name else text

        return re.sub(r"\{([^}:]+)(:[^}]*)?\}", fill, self.filename)


def _link(link: Path, target: str) -> None:
    """Let a symbolic link lead to a checkpoint beside it; it never leads nowhere in between."""
    beside = link.with_name(f".{link.name}.partial")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    beside.replace(link)
