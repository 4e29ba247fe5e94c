"""The ranks of a node, and the first ranks of all nodes, as process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from .hook import HookContext


@dataclass(frozen=True)
class Nodes:
    """Where this rank stands among the nodes.

    Args:
        ranks_per_node: ranks of each node, which have consecutive numbers.
        first: the first rank of this node.
        inside: the ranks of this node; None where this rank is alone on it.
        between: the first ranks of all nodes; None where this rank is none of them, or there is one node only.
    """

    ranks_per_node: int
    first: int
    inside: dist.ProcessGroup | None
    between: dist.ProcessGroup | None

    @classmethod
    def of(cls, context: HookContext, ranks_per_node: int | None) -> Nodes:
        """Make the groups; collective over all ranks.

        Raises:
            ValueError: the nodes would not have equally many ranks.
        """
        size, rank = context.environment.world_size, context.environment.rank
        each = context.environment.local_world_size if ranks_per_node is None else ranks_per_node
        if each < 1 or size % each:
            given = "" if ranks_per_node is None else f" (ranks_per_node={ranks_per_node})"
            raise ValueError(
                f"{size} ranks in nodes of {each}{given}: expected nodes of equally many ranks. Start the same number of "
                f"processes on every node, or give a ranks_per_node that divides {size}."
            )
        firsts = range(0, size, each)
        inside = between = None
        if each > 1:
            for first in firsts:  # every rank takes part in making every group, its own or not
                group = context.new_group(range(first, first + each))
                inside = inside if group is None else group
        if len(firsts) > 1:
            between = context.new_group(firsts)
        return cls(each, rank - rank % each, inside, between)
