"""Batches of predictions as samples: joined, put in order, and taken apart again.

A prediction is *batched* if each part of it has an item for each sample: a tensor whose first dimension is the batch, a
list with one item for each sample (a string, a dict, a tensor of its own shape …), or a dict, tuple or dataclass of such
parts. None stands for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def check_batched(prediction: Any, samples: int, where: str) -> None:
    """Refuse a prediction that can't be taken apart into its samples.

    Args:
        prediction: of one batch.
        samples: how many there are in the batch.
        where: names it, for the message.

    Raises:
        ValueError: a tensor or list has another length.
        TypeError: a part is no tensor, list, dict, tuple or dataclass.
    """
    if isinstance(prediction, Tensor):
        if not prediction.dim() or prediction.size(0) != samples:
            raise ValueError(
                f"{where} has shape {list(prediction.shape)}: expected the batch as its first dimension, {samples} here."
            )
    elif isinstance(prediction, list):
        length = len(cast("list[Any]", prediction))
        if length != samples:
            raise ValueError(
                f"{where} is a list of {length}: expected one item for each of the {samples} samples of the batch. Several "
                "tensors go into a tuple or a dict."
            )
    elif (parts := _parts(prediction)) is not None:
        for name, part in parts.items():
            check_batched(part, samples, f"{where}[{name!r}]")
    elif prediction is not None:
        raise TypeError(
            f"{where} is a {type(prediction).__name__}: expected a tensor, a list with an item for each sample, or a dict or "
            "tuple of those."
        )


def joined(predictions: Sequence[Any]) -> Any:
    """One batch of all samples of several, in their order.

    Raises:
        ValueError: they don't fit together: another structure, or tensors of other shapes.
    """
    first = predictions[0]
    for other in predictions[1:]:
        if type(other) is not type(first) or _keys(other) != _keys(first):
            raise ValueError(f"predictions differ from batch to batch: {_described(first)}, and {_described(other)}.")
    if isinstance(first, Tensor):
        shapes = {tuple(tensor.shape[1:]) for tensor in predictions}
        if len(shapes) > 1:
            each = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise ValueError(
                f"predictions of several batches have samples of shapes {each}, which make no tensor: expected the same in "
                "each. Return a list with a tensor for each sample."
            )
        return torch.cat(list(predictions))
    if isinstance(first, list):
        return [item for prediction in predictions for item in prediction]
    return _rebuilt(first, lambda name: joined([_parts(prediction)[name] for prediction in predictions]))  # pyright: ignore


def taken(prediction: Any, places: Sequence[int]) -> Any:
    """The samples at these places of a batch, in this order."""
    if isinstance(prediction, Tensor):
        return prediction[torch.as_tensor(places, dtype=torch.int64)]
    if isinstance(prediction, list):
        items = cast("list[Any]", prediction)
        return [items[place] for place in places]
    return _rebuilt(prediction, lambda name: taken(_parts(prediction)[name], places))  # pyright: ignore


def mapped_parts(prediction: Any, change: Callable[[Any], Any]) -> Any:
    """The prediction with each part of it changed; what has no parts stays."""
    if isinstance(prediction, list):
        return [change(item) for item in cast("list[Any]", prediction)]
    parts = _parts(prediction)
    return prediction if parts is None else _rebuilt(prediction, lambda name: change(parts[name]))


def _parts(prediction: Any) -> dict[Any, Any] | None:
    """The parts of a dict, tuple or dataclass by name; None: it is none of these."""
    if isinstance(prediction, Mapping):
        return dict(cast("Mapping[Any, Any]", prediction))
    if isinstance(prediction, tuple):
        return dict(enumerate(cast("tuple[Any, ...]", prediction)))
    if dataclasses.is_dataclass(prediction) and not isinstance(prediction, type):
        return {field.name: getattr(prediction, field.name) for field in dataclasses.fields(prediction)}
    return None


def _rebuilt(prediction: Any, part: Callable[[Any], Any]) -> Any:
    """A prediction of the same kind with other parts; None stays None."""
    parts = _parts(prediction)
    if parts is None:
        return prediction
    new, kind = {name: part(name) for name in parts}, cast("Any", type(prediction))
    if isinstance(prediction, Mapping):
        return new if kind is dict else kind(new)
    if isinstance(prediction, tuple):
        return kind(*new.values()) if hasattr(kind, "_fields") else kind(new.values())
    return dataclasses.replace(prediction, **new)


def _keys(prediction: Any) -> list[Any] | None:
    parts = _parts(prediction)
    return None if parts is None else list(parts)


def _described(prediction: Any) -> str:
    keys = _keys(prediction)
    return f"a {type(prediction).__name__}" + ("" if keys is None else f" of {', '.join(map(repr, keys)) or 'nothing'}")
