"""`Hierarchical`: inside the nodes first, so that between them each gradient travels once per node."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .hook import HookContext
from .nodes import Nodes
from .ordered import Bucket, OrderedHook
from .reduction import Plain, Wire, checked_wire


class Hierarchical(OrderedHook):
    """Reduce inside each node, average between the nodes' first ranks over a wire, broadcast inside each node.

    For nodes joined by a network that is slower than what joins the ranks of one node. A compressing wire then costs
    precision only where it saves time. It has no state.

    Args:
        between: the wire between the nodes, for instance `Int8()`.
        ranks_per_node: None: as many as the launcher started on each host.

    Raises:
        ValueError: from `setup`, when the nodes would not have equally many ranks.
    """

    def __init__(self, between: Wire | None = None, *, ranks_per_node: int | None = None) -> None:
        super().__init__()
        self.between = Plain() if between is None else checked_wire(between)
        self.ranks_per_node = ranks_per_node
        self._nodes: Nodes | None = None

    def setup(self, context: HookContext) -> None:
        """Make the groups of the nodes."""
        nodes = Nodes.of(context, self.ranks_per_node)
        super().setup(context)
        self._nodes = nodes

    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        """The three phases. The first rank of each node has the mean, and the others get its bits."""
        nodes, mean = self._nodes, bucket.flat
        assert nodes is not None
        if nodes.inside is not None:
            mean.mul_(1 / nodes.ranks_per_node)
            dist.reduce(mean, nodes.first, group=nodes.inside)
        if nodes.between is not None:
            mean = self.between.mean(mean, nodes.between)
        if nodes.inside is not None:
            mean = mean.contiguous()
            dist.broadcast(mean, nodes.first, group=nodes.inside)
        return mean

    def teardown(self) -> None:
        """End the worker."""
        super().teardown()
        self._nodes = None
