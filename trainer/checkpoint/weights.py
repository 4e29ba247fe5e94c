"""A state dict as a safetensors file, tied weights included."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Names of tied weights, by the name under which their one tensor is stored.
_TIED = "samestep.tied"


def split_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state dict, and the rest (a module's `get_extra_state`)."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def save_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write the tensors; of tied ones (the same memory, shape and strides) one is written, and the others' names."""
    from safetensors.torch import save_file  # type: ignore[import-untyped]

    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        place = tensor.untyped_storage().data_ptr()
        same = (place, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and same in first:
            tied[name] = first[same]
            continue
        first[same] = name
        # A view of a larger tensor would drag all of it along.
        view = place in storages or tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()
        storages.add(place)
        stored[name] = tensor.clone().contiguous() if view else tensor.contiguous()
    # What Hugging Face's loaders ask for: a file of PyTorch's.
    save_file(stored, path, metadata={"format": "pt", _TIED: json.dumps(tied)})


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, to the CPU."""
    from safetensors import safe_open  # type: ignore[import-untyped]

    with cast("Any", safe_open)(os.fspath(path), framework="pt", device="cpu") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata: dict[str, str] = file.metadata() or {}
    tied: dict[str, str] = json.loads(metadata.get(_TIED, "{}"))
    return tensors | {name: tensors[source] for name, source in tied.items()}


def are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is no inf or NaN in them."""
    for tensor in tensors.values():
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
            continue
        extremes = torch.aminmax(tensor.detach() if tensor.itemsize > 1 else tensor.detach().float())
        if not torch.stack(extremes).isfinite().all():
            return False
    return True


def own_buffers(task: nn.Module) -> None:
    """Give buffers made by `expand` a memory of their own: no weights could be loaded into one shared by its elements."""
    copies: dict[int, Tensor] = {}
    for module in task.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.layout is not torch.strided or is_lazy(buffer):
                continue
            if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                copies.setdefault(id(buffer), buffer.contiguous())  # one that has two names stays one
                setattr(module, name, copies[id(buffer)])
