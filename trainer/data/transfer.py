"""Moving a batch of any shape to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with everything that has a `.to(device)` moved; containers are copied, the rest is kept.

    Tensors, objects with `.to` (packed sequences, graphs, your own), dicts, lists, tuples, named tuples and
    dataclasses, nested at will. From pinned memory the copy does not wait.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, str) or batch is None:
        return batch
    if isinstance(batch, Mapping):
        mapping = cast("Mapping[Any, Any]", batch)
        moved = {key: move_to_device(value, device) for key, value in mapping.items()}
        return moved if type(batch) is dict else cast("Any", type(batch))(moved)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(batch, (list, tuple)):
        items = [move_to_device(item, device) for item in cast("list[Any]", batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # pyright: ignore
    if hasattr(batch, "to"):
        return batch.to(device)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: move_to_device(getattr(batch, field.name), device) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **values)
    return batch


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of the first tensor found in it.

    Raises:
        ValueError: there is no tensor; give `self.log(…, batch_size=…)`.
    """
    found = _first_size(batch)
    if found is None:
        raise ValueError(
            f"can't tell the batch size: a {type(batch).__name__} without a tensor of one dimension or more. "
            "Say it: self.log(name, value, batch_size=…)."
        )
    return found


def _first_size(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = cast("Mapping[Any, Any]", batch).values()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif not isinstance(batch, (list, tuple)):
        return None
    for item in cast("list[Any]", batch):
        size = _first_size(item)
        if size is not None:
            return size
    return None
