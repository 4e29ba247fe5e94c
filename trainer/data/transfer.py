"""Moving a batch of any shape to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with everything that has a `.to(device)` moved; containers are copied, the rest is kept.

    Tensors, objects with `.to` (packed sequences, graphs, your own), dicts, lists, tuples, named tuples and
    dataclasses, nested at will. From pinned memory the copy does not wait.
    """

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=True)
        return item.to(device) if hasattr(item, "to") else item

    return _mapped(batch, move)


def moved_ahead(batches: Iterator[Any], move: Callable[[Any], Any], device: torch.device) -> Iterator[Any]:
    """The batches on a CUDA device, each copied there by a stream of its own while the step before it computes.

    Args:
        batches: in pinned memory, or their copies would wait for the device.
        move: brings one to the device.
        device: of CUDA.
    """
    copying = torch.cuda.Stream(device)

    def start(batch: Any) -> tuple[Any, Any]:
        # Behind all that is computed so far: the memory it gets may be that of a batch which is being computed with.
        copying.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copying):
            return move(batch), copying.record_event()

    coming: list[tuple[Any, Any]] = []
    for batch in batches:
        coming.append(start(batch))
        if len(coming) == 2:
            there, copied = coming.pop(0)
            torch.cuda.current_stream(device).wait_event(copied)
            yield there
    for there, copied in coming:
        torch.cuda.current_stream(device).wait_event(copied)
        yield there


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in another type."""
    return _mapped(batch, lambda i: i.to(dtype) if isinstance(i, torch.Tensor) and i.is_floating_point() else i)


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with each leaf changed."""
    if isinstance(batch, Mapping):
        mapping = cast("Mapping[Any, Any]", batch)
        changed = {key: _mapped(value, change) for key, value in mapping.items()}
        return changed if type(mapping) is dict else cast("Any", type(mapping))(changed)
    if isinstance(batch, (list, tuple)):
        sequence = cast("list[Any]", batch)
        items = [_mapped(item, change) for item in sequence]
        kind = cast("Any", type(sequence))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to"):
        values = {field.name: _mapped(getattr(batch, field.name), change) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **values)
    return change(batch)


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
