"""`PostLocalSGD`: after a while, average the weights now and then instead of the gradients in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .hook import HookContext
from .nodes import Nodes
from .ordered import Bucket, OrderedHook, real
from .reduction import Plain

# Small parameters travel together, up to this many numbers in a message.
_MESSAGE = 1 << 22


class PostLocalSGD(OrderedHook):
    """Post-local SGD: Lin, Stich, Patel, Jaggi 2020, https://arxiv.org/abs/1808.07217.

    Up to `start_step` gradients are averaged over all ranks. Afterwards only inside each node (not at all where a rank
    is alone on its node), each node goes its own way, and every `period` steps the parameters are averaged over all.

    This is not the training of one rank with all the data any more: between two averages the ranks hold different
    parameters. So do their optimizers (momentum) for the whole of the run, and buffers where the model does not
    synchronize them. Every rank must step or skip alike; with local gradients, one rank alone may find an inf.

    Args:
        start_step: optimizer steps with the mean over all ranks. The paper changes at the first decay of the learning
            rate: before it, weights move too far between two averages.
        period: optimizer steps from one average of the parameters to the next.
        ranks_per_node: None: as many as the launcher started on each host.

    Raises:
        ValueError: start_step or period is out of range; from `setup`, the nodes would not have equally many ranks.
    """

    ranks_differ: ClassVar[bool] = True

    def __init__(self, start_step: int = 1000, period: int = 8, *, ranks_per_node: int | None = None) -> None:
        if start_step < 0:
            raise ValueError(f"start_step={start_step}: expected 0 or more steps with the mean over all ranks.")
        if period < 1:
            raise ValueError(f"period={period}: expected 1 or more steps from one average to the next.")
        super().__init__()
        self.start_step = start_step
        self.period = period
        self.ranks_per_node = ranks_per_node
        self.optimizer_steps = 0
        self._nodes: Nodes | None = None
        self._apart = False

    def setup(self, context: HookContext) -> None:
        """Make the groups of the nodes, and start anew."""
        nodes = Nodes.of(context, self.ranks_per_node)
        super().setup(context)
        self._nodes, self.optimizer_steps, self._apart = nodes, 0, False

    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        """Over all ranks, or over those of this node."""
        assert self._nodes is not None
        among = group if self.optimizer_steps < self.start_step else self._nodes.inside
        return bucket.flat if among is None else Plain().mean(bucket.flat, among)

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Count; average the parameters where it is time."""
        self.optimizer_steps += 1
        # With one node the mean inside it is the mean over all.
        self._apart = self._apart or (self.optimizer_steps > self.start_step and not self._one_node)
        if (self.optimizer_steps - self.start_step) % self.period == 0:
            self.synchronize(parameters)

    def synchronize(self, parameters: Iterable[Tensor]) -> None:
        """Average the parameters over all ranks in place, unless they are equal already."""
        if not self._apart:
            return
        for tensors in _messages(parameters):
            self.run(lambda group, tensors=tensors: _average(tensors, group))
        self._apart = False

    def state_dict(self) -> dict[str, Any]:
        """`step`. It is meant for parameters that are equal: call `synchronize` first."""
        return {"step": self.optimizer_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self.optimizer_steps, self._apart = int(state["step"]), False

    def teardown(self) -> None:
        """End the worker."""
        super().teardown()
        self._nodes = None

    @property
    def _one_node(self) -> bool:
        return self._nodes is not None and self._nodes.ranks_per_node == self.context.environment.world_size


def _average(tensors: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    flats = [real(tensor.contiguous()) for tensor in tensors]
    mean = Plain().mean(torch.cat(flats), group)
    parts = cast("tuple[Tensor, ...]", mean.split([flat.numel() for flat in flats]))
    for tensor, part in zip(tensors, parts, strict=True):
        whole = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
        tensor.copy_(whole.view(tensor.shape))
    return mean


def _messages(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one type together, up to `_MESSAGE` numbers or a single larger one."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        tensors = waiting.setdefault(parameter.dtype, [])
        if tensors and sum(tensor.numel() for tensor in tensors) + parameter.numel() > _MESSAGE:
            yield list(tensors)
            tensors.clear()
        tensors.append(parameter.detach())
    yield from waiting.values()
