"""A short text that is equal for equal values, and for no others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor


def digest(value: Any) -> str:
    """Of every bit of the tensors and numbers in a value, however deeply nested; of other objects the type only."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        yield f"{value.dtype}{list(value.shape)}".encode()
        if value.is_sparse:
            value = value.to_dense()
        if value.numel():
            yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        # The order of keys may come from threads: a hook's state is filled by two.
        for key, item in sorted(cast("Mapping[Any, Any]", value).items(), key=lambda pair: repr(pair[0])):
            yield f"{key!r}:".encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"{len(cast('Any', value))}[".encode()
        for item in cast("Iterable[Any]", value):
            yield from _parts(item)
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):  # of numpy
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        yield repr(value).encode()
    else:
        yield type(cast("object", value)).__qualname__.encode()
