"""The process's place among its peers, as torchrun's environment variables tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

# What torchrun sets for each worker. A hand-made launcher must set the same.
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Environment:
    """Where this process stands. All counts are processes.

    `launched` is True when a launcher (torchrun, or a test that made the process group itself)
    started this process as one of `world_size`; False for a plain `python program.py`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0
    launched: bool = False

    @property
    def num_nodes(self) -> int:
        """Hosts, taking every host to run the same number of processes."""
        return max(1, self.world_size // self.local_world_size)

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read torchrun's variables (default: `os.environ`).

        Raises:
            RuntimeError: some are set and some are missing, one is no number, or they contradict
                each other. The message names the variable, what was found and what to do.
        """
        variables = os.environ if variables is None else variables
        present = [name for name in LAUNCH_VARIABLES if variables.get(name)]
        if not present:
            if dist.is_available() and dist.is_initialized():  # made by hand, without torchrun
                return cls(dist.get_rank(), dist.get_rank(), dist.get_world_size(), 1, 0, True)
            return cls()
        missing = [name for name in LAUNCH_VARIABLES if name not in present]
        if missing:
            raise RuntimeError(
                f"{_quoted(present, variables)} set, but {', '.join(missing)} not: expected all of "
                f"{', '.join(LAUNCH_VARIABLES)} or none. Start the program with "
                f"`torchrun --nproc-per-node=N program.py`, or unset {' '.join(present)} to run one process."
            )
        environment = cls(
            rank=_number("RANK", variables),
            local_rank=_number("LOCAL_RANK", variables),
            world_size=_number("WORLD_SIZE", variables),
            local_world_size=_number("LOCAL_WORLD_SIZE", variables, variables["WORLD_SIZE"]),
            restart=_number("TORCHELASTIC_RESTART_COUNT", variables, "0"),
            launched=True,
        )
        for name, value, bound in (
            ("RANK", environment.rank, environment.world_size),
            ("LOCAL_RANK", environment.local_rank, environment.local_world_size),
        ):
            if not value < bound:
                raise RuntimeError(
                    f"{name}={value}: expected 0 to {bound - 1}, as {_quoted(present, variables)}. "
                    f"Every process needs its own {name}; torchrun sets it."
                )
        return environment


def _number(name: str, variables: Mapping[str, str], default: str = "") -> int:
    text = variables.get(name) or default
    if not text.isdecimal():
        raise RuntimeError(f"{name}={text!r}: expected a whole number of 0 or more. torchrun sets it.")
    return int(text)


def _quoted(names: list[str], variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names)
