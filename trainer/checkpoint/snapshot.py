"""A state as it is now, on the host: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class HostMemory:
    """Memory that snapshots are copied into, kept from one to the next: to get fresh memory takes longer than to copy.

    It is as large as the newest snapshot.
    """

    def __init__(self) -> None:
        self._lent: dict[Any, list[Tensor]] = {}

    def snapshot(self, state: T) -> T:
        """A copy of a state (tensors in dicts, lists and tuples) on the host. It lasts until the next one is taken.

        From CUDA the copies go to pinned memory, all at once, and are waited for once; on the device nothing is copied.
        Tensors that are one stay one; of a view of a larger tensor only the view is copied.
        """
        free, self._lent = self._lent, defaultdict(list)
        copies: dict[Any, Tensor] = {}
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return tensor.to("cpu", copy=True)
            form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
            place = (tensor.device, tensor.data_ptr(), *form)
            if place not in copies or not tensor.numel():
                fitting = free.get(form)
                host = fitting.pop() if fitting else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._lent[form].append(host)
                copies[place] = host.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
            return copies[place]

        snapshot = _with_tensors(state, copied)
        for device in devices:
            torch.cuda.current_stream(device).record_event().synchronize()
        return snapshot

    def clear(self) -> None:
        """Give the memory back."""
        self._lent = {}


def compact(state: T) -> T:
    """The state itself, but for views of larger tensors: of those torch.save would write all that they are a part of."""

    def own(tensor: Tensor) -> Tensor:
        strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        part = strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        return tensor.detach().clone() if part else tensor

    return _with_tensors(state, own)


def _with_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts, lists, tuples and sets anew, with `function` of each tensor in them."""
    kind: Any = value.__class__
    anew: Any = kind
    if isinstance(value, Tensor):
        return function(value)
    if issubclass(kind, dict):
        return anew({key: _with_tensors(item, function) for key, item in value.items()})
    if kind in (list, tuple, set):
        # A look at the type for each of the thousand numbers of a generator's state, not a call.
        numbers = (int, float)
        return anew([item if item.__class__ in numbers else _with_tensors(item, function) for item in value])
    return value
