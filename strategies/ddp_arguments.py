"""The arguments of torch's DistributedDataParallel, by what the installed version takes; and the pairs that do harm."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

COMPILE_ORDERS = ("off", "before_ddp", "after_ddp")
UNEVEN_INPUTS = ("error", "stop", "join")
_TAKEN = frozenset(inspect.signature(cast("Any", DistributedDataParallel)).parameters)


@dataclass(frozen=True)
class DDPArguments:
    """Options that go to torch's constructor; see `DDPStrategy` for what each saves and costs."""

    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    forward_sync_buffers: bool = True
    init_sync: bool = True
    batched_grad_copy: bool = False
    device_mesh: Any = None

    def __post_init__(self) -> None:
        """Refuse values and pairs that torch refuses late, or not at all."""
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False.")
        if self.bucket_cap_mb is not None and not _is_size(self.bucket_cap_mb):
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb}: expected MiB above 0, or None for torch's default.")
        if self.bucket_cap_mb_list is not None:
            if not self.bucket_cap_mb_list or not all(map(_is_size, self.bucket_cap_mb_list)):
                raise ValueError(f"bucket_cap_mb_list={self.bucket_cap_mb_list}: expected MiB above 0 for each bucket.")
            if self.bucket_cap_mb is not None:
                raise ValueError(
                    "bucket_cap_mb and bucket_cap_mb_list: the list overrides the number. Give one of them."
                )
        if self.static_graph and self.find_unused_parameters:
            raise ValueError(
                "static_graph and find_unused_parameters: a static graph finds the unused parameters by itself, once. "
                "Leave find_unused_parameters out; or static_graph, where the steps use different parameters."
            )
        for name in ("bucket_cap_mb_list", "batched_grad_copy"):
            if getattr(self, name) and name not in _TAKEN:
                raise ValueError(f"{name} needs a newer torch than {torch.__version__}: leave it out.")

    def keywords(self, process_group: Any) -> dict[str, Any]:
        """Keyword arguments for torch's constructor."""
        keywords: dict[str, Any] = {
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            "init_sync": self.init_sync,
        }
        if self.bucket_cap_mb_list is not None:
            keywords["bucket_cap_mb_list"] = list(self.bucket_cap_mb_list)
        if self.batched_grad_copy:
            keywords["batched_grad_copy"] = True
        if not self.forward_sync_buffers:
            # torch 2.13 renamed it, since the older name also left out the broadcast at the start.
            name = "forward_sync_buffers" if "forward_sync_buffers" in _TAKEN else "broadcast_buffers"
            keywords[name] = False
        if self.device_mesh is None:
            return {**keywords, "process_group": process_group}
        return {**keywords, "device_mesh": self.device_mesh}


_SWITCHES = (
    "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "forward_sync_buffers", "init_sync",
    "batched_grad_copy",
)  # fmt: skip


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


Pair = tuple[bool, str, str, str]


def refuse_pairs(pairs: Iterable[Pair]) -> None:
    """Raise for the first pair of levers that are both on and can't go together.

    Args:
        pairs: whether both are on, the one, the other, and why that is refused.

    Raises:
        ValueError: names both, and the reason.
    """
    for together, first, second, why in pairs:
        if together:
            raise ValueError(f"{first} and {second} can't go together: {why}.")
