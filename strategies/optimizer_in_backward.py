"""Optimizer in backward: each bucket's parameters are updated as its reduction ends, while the backward goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .comm_hooks import CommHook

BucketReduction = Callable[[dist.GradBucket], "torch.futures.Future[Tensor]"]


class OptimizerInBackward(CommHook):
    """Updates parameters bucket by bucket with an ordinary optimizer, by a communication hook of DDP.

    A part of the optimizer steps the parameters of one bucket: a shallow copy that shares its state, over groups
    with its present options. So schedulers move the real groups, and a state dict has the layout it always has.
    Since each parameter's update depends on that parameter alone, the result is the ordinary one, bit by bit.

    Args:
        optimizer: updates every parameter by itself, as all of torch.optim do but LBFGS.
        reduce: gives the mean gradient of a bucket over the ranks.

    Raises:
        ValueError: the optimizer couples its parameters.
    """

    def __init__(self, optimizer: Optimizer, reduce: BucketReduction) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError("optimizer_in_backward with LBFGS: its update needs all gradients. Leave one of them out.")
        self.optimizer, self._reduce = optimizer, reduce
        # Parameters of each bucket, while the first step is under way. It is taken behind the backward: DDP makes its
        # buckets anew after it, which takes most memory if the optimizer's state is there already.
        self._first: list[list[Tensor]] | None = []
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of a bucket, and the update behind it."""
        # Taken now: the bucket is not there any more when the reduction ends.
        parameters, buffer = bucket.parameters(), bucket.buffer()
        if self._first is not None:
            self._first.append(parameters)
            return self._reduce(bucket)

        def update(reduced: torch.futures.Future[Tensor]) -> Tensor:
            mean = reduced.value()
            if mean.data_ptr() != buffer.data_ptr():
                buffer.copy_(mean)  # gradients are views into it
            self._update(parameters)
            return buffer

        return self._reduce(bucket).then(update)

    def step(self) -> None:
        """What is left of an optimizer step when the backward is over: its hooks, and what schedulers watch.

        It steps no parameters: all are updated, but in the first step, which is taken here, bucket by bucket.
        """
        for parameters in self._first or ():
            self._update(parameters)
        self._first = None
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**group, "params": []} for group in groups]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups

    def _update(self, parameters: list[Tensor]) -> None:
        groups: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            index = self._group_of.get(id(parameter))
            if index is not None:  # not all trainable parameters need be in the optimizer
                groups.setdefault(index, []).append(parameter)
        part: Any = object.__new__(type(self.optimizer))
        vars(part).update(vars(self.optimizer))
        vars(part).pop("step", None)  # a scheduler's wrapper, which counts the steps of the whole
        part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        part.param_groups = [{**self.optimizer.param_groups[index], "params": those} for index, those in groups.items()]
        part.step()
        for index, group in zip(groups, part.param_groups, strict=True):
            whole = self.optimizer.param_groups[index]
            changed = [key for key in group if key != "params" and group[key] is not whole.get(key)]
            if changed:
                raise RuntimeError(
                    f"optimizer_in_backward: {type(part).__name__}.step changes {', '.join(changed)} of its groups, so the "
                    "update of one parameter depends on the others. Leave optimizer_in_backward out, or use another "
                    "optimizer."
                )
