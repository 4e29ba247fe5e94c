"""What the autograd graph of a loss says before its backward runs: the parameters it reaches, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph behind `loss`, each once."""
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        ahead += [following for following, _ in node.next_functions]


def reached_parameters(loss: Tensor) -> set[int]:
    """The `id` of every leaf tensor that gets a gradient from `loss`."""
    return {id(node.variable) for node in nodes(loss) if hasattr(node, "variable")}


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether a checkpoint with `use_reentrant=True` is behind `loss`: the parameters inside it are not reached."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes(loss))
