"""Which strategy, how many processes, and which device for this one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from ..strategies import DDPStrategy, Environment, Precision, SingleDeviceStrategy, Strategy
from .config import TrainerConfig
from .strategy_check import check_strategy

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "single_device")


@dataclass(frozen=True)
class Placement:
    """What the options and torchrun's environment come to."""

    device: torch.device
    processes: int
    """Processes of this host, of which this one is to be one."""
    to_launch: bool
    """Whether those processes must still be started."""


def placed_strategy(given: Strategy | str, config: TrainerConfig) -> tuple[Strategy, int]:
    """The strategy at its place in this process, and the number of processes to be started first; 0: they run already.

    Raises:
        ValueError, TypeError: the strategy, the devices, the precision and the options of a step don't go together.
    """
    environment = Environment.read()
    placement = place(config, environment)
    ranks = environment.world_size if environment.launched else placement.processes
    strategy = choose_strategy(given, config, ranks)
    check_strategy(strategy)
    precision = Precision.parse(config.precision)
    if placement.to_launch:  # checked as it will be there
        expected = replace(environment, world_size=ranks, local_world_size=ranks)
        strategy.place(expected, placement.device, precision)
    strategy.place(environment, placement.device, precision)
    strategy.check_step(
        accumulation=config.accumulate_grad_batches,
        clip_limit=config.gradient_clip_val,
        skips=config.skip_nonfinite is not None,
    )
    return strategy, placement.processes if placement.to_launch else 0


def place(config: TrainerConfig, environment: Environment) -> Placement:
    """Work out the devices.

    Raises:
        ValueError: there is no such device, or the options contradict each other or torchrun.
    """
    kind = _accelerator(config)
    indices = _gpu_indices(config) if kind == "cuda" else None
    wanted = _cpu_processes(config) if indices is None else len(indices)
    if not environment.launched:
        if config.num_nodes not in (None, 1):
            raise ValueError(
                f"num_nodes={config.num_nodes} without torchrun: on every host start `torchrun "
                f"--nnodes={config.num_nodes} --nproc-per-node=N --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT program.py`."
            )
        processes = 1 if wanted is None else wanted
        if config.max_restarts and processes == 1:
            raise ValueError(
                f"max_restarts={config.max_restarts} on one process, which nobody starts again: expected devices=N, or torchrun "
                "--max-restarts=N."
            )
        return Placement(_device(kind, indices, 0), processes, processes > 1)
    if config.num_nodes not in (None, environment.num_nodes):
        raise ValueError(f"num_nodes={config.num_nodes}, but torchrun started {environment.num_nodes}: leave it out.")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if config.max_restarts and str(config.max_restarts) != restarts:
        raise ValueError(
            f"max_restarts={config.max_restarts}, but torchrun was started with --max-restarts={restarts}: leave it out."
        )
    started = environment.local_world_size
    if config.devices == "auto" and indices is not None and started <= len(indices):
        indices = indices[:started]
    elif wanted is not None and config.devices not in ("auto", -1, "-1") and wanted != started:
        raise ValueError(
            f"devices={config.devices!r}, but this program runs as {started} processes on this host, started by torchrun or "
            f"for an earlier Trainer(devices={started}): expected the same number in all of it, or devices='auto'."
        )
    if indices is not None and started > len(indices):
        raise ValueError(
            f"torchrun started {started} processes on this host, which has {len(indices)} GPUs to use: expected at most "
            "one process for each."
        )
    return Placement(_device(kind, indices, environment.local_rank), started, False)


def choose_strategy(given: Strategy | str, config: TrainerConfig, ranks: int) -> Strategy:
    """The strategy object for a name, or the one that was given.

    Raises:
        ValueError, TypeError: unknown, or it contradicts `sync_batchnorm`.
    """
    if isinstance(given, Strategy):
        if config.sync_batchnorm and not getattr(given, "sync_batchnorm", False):
            raise ValueError(
                "sync_batchnorm=True beside a strategy object: say it there, "
                f"strategy={type(given).__name__}(sync_batchnorm=True)."
            )
        return given
    if isinstance(given, type):
        raise TypeError(f"strategy={given.__name__}: expected an object, strategy={given.__name__}().")
    if given not in STRATEGIES:
        raise ValueError(f"strategy={given!r}: expected one of {', '.join(STRATEGIES)}, or a Strategy object.")
    if given == "single_device" or (given == "auto" and ranks == 1):
        return SingleDeviceStrategy()
    return DDPStrategy(find_unused_parameters=given.endswith("_true"), sync_batchnorm=config.sync_batchnorm)


def _accelerator(config: TrainerConfig) -> str:
    if config.accelerator in ("gpu", "cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"accelerator={config.accelerator!r}, but torch sees no GPU: use 'cpu' or 'auto'.")
        return "cuda"
    return "cuda" if config.accelerator == "auto" and torch.cuda.is_available() else "cpu"


def _cpu_processes(config: TrainerConfig) -> int | None:
    """None: whatever was started."""
    devices = config.devices
    if devices == "auto":
        return None
    text = str(devices)
    if not text.isdecimal() or not int(text):
        raise ValueError(f"devices={devices!r} on the CPU: expected a number of processes, 1 or more, or 'auto'.")
    return int(text)


def _gpu_indices(config: TrainerConfig) -> list[int]:
    available, devices = torch.cuda.device_count(), config.devices
    if devices in ("auto", -1, "-1"):
        return list(range(available))
    try:
        if isinstance(devices, list):
            indices = [int(index) for index in devices]
        elif isinstance(devices, str) and "," in devices:
            indices = [int(index) for index in devices.split(",") if index.strip()]
        else:
            indices = list(range(int(devices)))
    except ValueError:
        indices = []
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < available for index in indices):
        raise ValueError(
            f"devices={devices!r}: expected a number from 1 to {available}, a list of different GPUs from 0 to "
            f"{available - 1}, -1, or 'auto'. CUDA_VISIBLE_DEVICES decides which torch sees."
        )
    return indices


def _device(kind: str, indices: list[int] | None, local_rank: int) -> torch.device:
    return torch.device("cpu") if indices is None else torch.device(kind, indices[local_rank])
