"""`TrainerConfig`: every option of the trainer, once, with its unit and its check."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal

Fraction = int | float


@dataclass(frozen=True)
class TrainerConfig:
    """The options of a `Trainer`. Names and meanings are Lightning's, except where the text says so.

    "Batch" means micro-batch (one forward and backward of one rank), "step" one optimizer step.
    Impossible values raise `ValueError` here, at construction.
    """

    accelerator: str = "auto"
    """`cpu`, `gpu` (or `cuda`), or `auto`: gpu where there is one."""

    devices: int | str | list[int] = "auto"
    """Processes on this host, one device each. `auto`: all GPUs, or one CPU process; -1: all GPUs.
    A list (or "0,2") names the GPUs. Under torchrun its number of processes counts; another number is refused."""

    num_nodes: int | None = None
    """Hosts. None: as many as torchrun says. A number is checked against that."""

    max_restarts: int = 0
    """How often all ranks of `devices=N` are started again after one has failed; `ckpt_path="auto"` then goes on.
    torchrun has an option of the same name; another number than torchrun's is refused."""

    strategy: str = "auto"
    """`auto` (DDP on several processes), `ddp`, `ddp_find_unused_parameters_true`, `single_device`;
    or a `Strategy` object, given to `Trainer(strategy=…)`."""

    precision: int | str = "32-true"
    """`32-true`, `64-true`, `bf16-mixed`, `16-mixed`, `bf16-true` or `16-true` (also 32, 64, "bf16" and 16, which are
    mixed); see `Precision`."""

    max_epochs: int | None = None
    """Epochs to train; -1: no limit. None: 1000, or no limit where `max_steps` or `max_time` is given."""

    min_epochs: int | None = None
    """Epochs below which no early stop is followed."""

    max_steps: int = -1
    """Optimizer steps to train in all; -1: no limit."""

    min_steps: int | None = None
    """Optimizer steps below which no early stop is followed."""

    max_time: str | dict[str, int] | None = None
    """Time after which to stop, as "DD:HH:MM:SS" or `{"hours": 1}`, by the clock of any rank; also a `timedelta`
    in `Trainer(max_time=…)`. All ranks stop at the same step, within about a second."""

    limit_train_batches: int | float = 1.0
    """Batches of an epoch and rank: a whole number, or a share from 0.0 to 1.0."""

    limit_val_batches: int | float = 1.0
    """As `limit_train_batches`, for each validation loader. 0 turns validation off."""

    limit_test_batches: int | float = 1.0
    """As `limit_train_batches`, for each test loader."""

    limit_predict_batches: int | float = 1.0
    """As `limit_train_batches`, for each prediction loader."""

    fast_dev_run: int | bool = False
    """True (1) or n: one epoch of n batches everywhere; no logger, checkpoint, early stop or sanity check."""

    overfit_batches: int | float = 0.0
    """Train on these batches only (number or share), unshuffled, and validate on the same; 0 is off."""

    val_check_interval: int | float | None = None
    """Validate after so many batches (int), or after each such share of an epoch (float). None: 1.0, an epoch.
    A check that falls inside an accumulation window waits for its step."""

    check_val_every_n_epoch: int | None = 1
    """Validate in every n-th epoch. None: `val_check_interval` (an int) counts batches across epochs."""

    num_sanity_val_steps: int = 2
    """Validation batches run before training, to find a broken validation early; -1: all, 0: none."""

    log_every_n_steps: int = 50
    """Log step values after every n-th optimizer step."""

    logger: bool = True
    """True: `TensorBoardLogger`; False: none. Logger objects are given to `Trainer(logger=…)`."""

    enable_checkpointing: bool = True
    """Add a `ModelCheckpoint()` where the callbacks hold none."""

    enable_progress_bar: bool = True
    """Add a `ProgressBar()` where the callbacks hold none."""

    enable_model_summary: bool = True
    """Show the layers and the step panel when fit starts."""

    enable_signal_handlers: bool = True
    """On SIGTERM, SIGINT or SIGUSR1 save, and end the program; all ranks at the same step. False: leave signals alone."""

    accumulate_grad_batches: int = 1
    """Batches in one step (the window). The gradient is their mean; a short last window is a mean of fewer."""

    gradient_clip_val: int | float | None = None
    """Clip gradients to this norm or value, once per step. None: no clipping."""

    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    """`norm`: the norm over all parameters; `value`: each element."""

    skip_nonfinite: int | None = None
    """Skip steps whose gradients hold inf or NaN, on all ranks alike, up to so many in a row; then the run ends as diverged.
    None: take them. On a GPU the CPU waits for the gradients in each step. 16-mixed skips by itself."""

    deterministic: bool | Literal["warn"] = False
    """Use deterministic algorithms in torch, where one is missing raise (True) or warn ("warn")."""

    benchmark: bool | None = None
    """Let cuDNN time its algorithms and take the fastest. None: leave torch's setting."""

    inference_mode: bool = True
    """Evaluate under `torch.inference_mode`; False: under `torch.no_grad`."""

    detect_anomaly: bool = False
    """Let autograd name the forward operation whose backward made a NaN. Slow."""

    use_distributed_sampler: bool = True
    """Deal the samples of a DataLoader to the ranks, in an order that depends on seed and epoch only.
    False: take loaders as they are; they must then read another share on each rank."""

    reload_dataloaders_every_n_epochs: int = 0
    """Ask task or data module for new loaders at the start of every n-th epoch (0, n, 2n, …); 0: once, for the run."""

    per_sample_seed: bool = False
    """What `dataset[index]` draws (Python's, numpy's and torch's generators on the CPU) becomes a function of (seed,
    epoch, index): the same on any number of ranks and workers, and after a resume."""

    resume_batch: Literal["keep", "scale"] = "keep"
    """On another number of ranks than the checkpoint's, `keep` the batch of all ranks by another batch size of each, so
    that steps and learning rates go on as they were; or keep each rank's and let that of all `scale` with the ranks."""

    sync_batchnorm: bool = False
    """Normalize over the batches of all ranks (see `DDPStrategy`)."""

    hang_timeout: int | float | None = 10.0
    """Seconds without progress after which it is said which ranks wait, and for whom; None: never. Preparing data,
    compiling, the first step and writing a checkpoint may take longer: half of the strategy's timeout."""

    hang_action: Literal["report", "exit"] = "report"
    """What follows then: `report`: the run waits on; `exit`: all ranks end at once."""

    seed: int | None = None
    """Seed of everything: set at construction of the Trainer, equal on all ranks, so build the task after it;
    during a run each rank has its own stream derived from it. None: drawn by rank 0."""

    default_root_dir: str | None = None
    """Folder of the run's output. None: `runs/<Task>-<UTC time>`, made when something is written."""

    def __post_init__(self) -> None:
        """Check every option on its own, and the pairs that exclude each other."""
        _one_of(self, "accelerator", ("auto", "cpu", "gpu", "cuda"))
        _one_of(self, "gradient_clip_algorithm", ("norm", "value"))
        _one_of(self, "hang_action", ("report", "exit"))
        _one_of(self, "deterministic", (True, False, "warn"))
        _one_of(self, "resume_batch", ("keep", "scale"))
        if self.default_root_dir == "":
            raise _wrong(self, "default_root_dir", "a folder, '.' for the present one, or None")
        for name in ("max_epochs", "max_steps", "num_sanity_val_steps"):
            _whole(self, name, least=-1, optional=name == "max_epochs")
        for name in ("min_epochs", "min_steps"):
            _whole(self, name, least=0, optional=True)
        _whole(self, "max_restarts", least=0)
        for name in ("num_nodes", "check_val_every_n_epoch"):
            _whole(self, name, least=1, optional=True)
        for name in ("log_every_n_steps", "accumulate_grad_batches"):
            _whole(self, name, least=1)
        _whole(self, "reload_dataloaders_every_n_epochs", least=0)
        _whole(self, "skip_nonfinite", least=1, optional=True)
        if self.skip_nonfinite is not None and self.precision in (16, "16", "16-mixed"):
            raise ValueError(
                f"skip_nonfinite={self.skip_nonfinite} with precision={self.precision!r}: its scaler skips such steps already, and "
                "finds its scale by them. Leave skip_nonfinite out."
            )
        _whole(self, "seed", least=0, most=2**63 - 1, optional=True)
        for stage in ("train", "val", "test", "predict"):
            _batches(self, f"limit_{stage}_batches")
        _batches(self, "overfit_batches")
        if self.val_check_interval is not None:
            _batches(self, "val_check_interval")
            if not self.val_check_interval:
                raise _wrong(
                    self,
                    "val_check_interval",
                    "a share above 0, or 1 or more batches; limit_val_batches=0 turns validation off",
                )
        for name in (
            "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_signal_handlers", "inference_mode",
            "detect_anomaly", "use_distributed_sampler", "per_sample_seed", "sync_batchnorm",
        ):  # fmt: skip
            _one_of(self, name, (True, False))
        _one_of(self, "benchmark", (True, False, None))
        if not isinstance(self.fast_dev_run, bool):
            _whole(self, "fast_dev_run", least=0)
        for name, what in (("gradient_clip_val", "no clipping"), ("hang_timeout", "no watch")):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                raise _wrong(self, name, f"a number above 0, or None for {what}")
        if self.default_root_dir is not None and not isinstance(self.default_root_dir, str):  # pyright: ignore
            raise _wrong(self, "default_root_dir", "a path")
        self.time_limit()  # refuses what it can't read
        if self.check_val_every_n_epoch is None and not isinstance(self.val_check_interval, int):
            raise ValueError(
                f"check_val_every_n_epoch=None counts batches across epochs, so val_check_interval must be a whole "
                f"number of batches: received {self.val_check_interval!r}."
            )
        for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
            low, high = getattr(self, least), getattr(self, most)
            if low is not None and high is not None and 0 <= high < low:
                raise ValueError(f"{least}={low} is above {most}={high}: expected {least} ≤ {most}.")

    def time_limit(self) -> timedelta | None:
        """`max_time` as a timedelta."""
        value: Any = self.max_time
        if value is None or isinstance(value, timedelta):
            return value
        try:
            if isinstance(value, str):
                days, hours, minutes, seconds = (int(part) for part in value.split(":"))
                return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
            return timedelta(**dict(value))
        except (TypeError, ValueError):
            raise _wrong(self, "max_time", '"DD:HH:MM:SS", a dict such as {"hours": 1}, or a timedelta') from None

    def resolved(self) -> TrainerConfig:
        """The same with `fast_dev_run` spelled out and a number for `max_epochs`."""
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            return dataclasses.replace(
                self, fast_dev_run=False, max_epochs=1, min_epochs=None, min_steps=None, max_steps=-1,
                limit_train_batches=batches, limit_val_batches=batches, limit_test_batches=batches,
                limit_predict_batches=batches, num_sanity_val_steps=0, val_check_interval=None,
                check_val_every_n_epoch=1, logger=False, enable_checkpointing=False, log_every_n_steps=1,
            )  # fmt: skip
        if self.max_epochs is None:
            bounded = self.max_steps >= 0 or self.max_time is not None
            return dataclasses.replace(self, max_epochs=-1 if bounded else 1000)
        return self


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(TrainerConfig))


def check_option_names(names: list[str]) -> None:
    """Refuse names that are no option.

    Raises:
        TypeError: names the option that was probably meant.
    """
    for name in names:
        if name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(OPTION_NAMES)}."
            raise TypeError(f"Trainer has no option {name!r}: {hint}")


def _wrong(config: TrainerConfig, name: str, expected: str) -> ValueError:
    return ValueError(f"{name}={getattr(config, name)!r}: expected {expected}.")


def _one_of(config: TrainerConfig, name: str, allowed: tuple[object, ...]) -> None:
    value = getattr(config, name)
    if not any(value is item or (isinstance(item, str) and value == item) for item in allowed):
        raise _wrong(config, name, "one of " + ", ".join(map(repr, allowed)))


def _whole(config: TrainerConfig, name: str, *, least: int, most: int | None = None, optional: bool = False) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise _wrong(config, name, f"a whole number {bound}" + (" or None" if optional else ""))


def _batches(config: TrainerConfig, name: str) -> None:
    value = getattr(config, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if not number or (isinstance(value, float) and value > 1.0):
        raise _wrong(config, name, "a whole number of batches (int), or a share from 0.0 to 1.0 (float)")
