"""What the autograd graph of a loss says before its backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph behind `loss`, each once."""
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:  # not by recursion: a graph is as deep as the network, and a recurrent one is deep
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        ahead += [following for following, _ in node.next_functions]


def reached_parameters(loss: Tensor) -> set[int]:
    """The `id` of every leaf tensor that gets a gradient from `loss`."""
    return {id(node.variable) for node in nodes(loss) if hasattr(node, "variable")}
