"""DDP's buckets in a resumed run: laid out as in the run before, without a step of the user's.

DDP lays its buckets out anew after the first backward that reduces (with a static graph after the second), in the order
in which rank 0's gradients were ready. On three ranks or more, and with hooks that encode a bucket as a whole, another
layout is another rounding: a resumed run whose first step used the first layout would part from the run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Named = list[tuple[str, nn.Parameter]]


class ReadyOrder:
    """Notes the order in which gradients are ready, as long as it decides the buckets' layout.

    Args:
        model: not run yet.
        static_graph: torch counts how often each gradient is made in the first backward, and notes the order in the second.
    """

    def __init__(self, model: DistributedDataParallel, *, static_graph: bool) -> None:
        self._model, self._named, self._deciding = model, reduced_parameters(model), 2 if static_graph else 1
        self._backwards = 0
        self._ready: list[int] = []
        self._handles: list[Any] = []

    @property
    def is_known(self) -> bool:
        """Whether the layout is decided."""
        return self._backwards == self._deciding and not self._handles

    def begin_backward(self) -> None:
        """Called before each backward that reduces, until the layout is decided."""
        if self._backwards < self._deciding:
            if not self._handles:
                self._watch()
            self._backwards += 1
            self._ready.clear()
        else:
            self.forget()

    def forget(self) -> None:
        """Note nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self) -> None:
        for index, (_, parameter) in enumerate(self._named):

            def note(_: Tensor, index: int = index) -> None:
                if self._model.require_backward_grad_sync:
                    self._ready.append(index)

            self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def state_dict(self) -> dict[str, Any]:
        """`parameters`: names; `ready`: their indices, in order; `backwards`: how many the layout has seen, up to 2."""
        return {
            "parameters": [name for name, _ in self._named],
            "ready": list(self._ready),
            "backwards": self._backwards,
        }

    def replay(self, state: Mapping[str, Any]) -> bool:
        """Let DDP see backwards whose gradients are zeros, ready in the noted order. False: it was another model.

        Collective. Buffers become rank 0's, and gradients None; no code of the user's runs, if hooks are registered later.
        """
        if state["parameters"] != [name for name, _ in self._named] or state["backwards"] > self._deciding:
            return False
        self._ready, self._backwards = list(state["ready"]), state["backwards"]
        for _ in range(self._backwards):
            self._backward_of_zeros()
        self._model.reducer._rebuild_buckets()  # pyright: ignore[reportPrivateUsage]
        return True

    def _backward_of_zeros(self) -> None:
        model: Any = self._model
        model._pre_forward()
        loss: Tensor = model._post_forward(_zero_in_order([self._named[i][1] for i in self._ready], _sparse(model)))
        loss.backward()
        for _, parameter in self._named:
            parameter.grad = None


def reduced_parameters(model: DistributedDataParallel) -> Named:
    """The parameters that DDP reduces, in the order of its indices, under the task's names."""
    ignored = cast("set[str]", model.parameters_to_ignore)
    return [
        (name.removeprefix("task."), parameter)
        for name, parameter in cast("nn.Module", model.module).named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def _zero_in_order(parameters: list[nn.Parameter], sparse: set[int]) -> Tensor:
    """A zero whose backward makes the gradients in this order: autograd takes what was computed last first."""
    device = parameters[0].device
    loss = torch.zeros((), device=device, requires_grad=True)
    seen: set[int] = set()
    for parameter in reversed(parameters):
        if id(parameter) in seen:
            loss = cast("Tensor", _Again.apply(loss, parameter))
        else:
            loss = loss + _zero(parameter, id(parameter) in sparse)
        seen.add(id(parameter))
    return loss


def _zero(parameter: Tensor, sparse: bool) -> Tensor:
    if sparse:
        none = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return nn.functional.embedding(none, parameter, sparse=True).sum()
    return parameter.flatten()[:0].abs().sum()


def _sparse(model: nn.Module) -> set[int]:
    return {
        id(layer.weight)
        for layer in cast("Iterable[nn.Module]", model.modules())
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }


class _Again(torch.autograd.Function):
    """Makes a parameter's gradient once more in the same backward, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            _zero(ctx.parameter, sparse=False).backward()
        return gradients[0], None
