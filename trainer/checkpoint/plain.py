"""What may stand in a checkpoint: values that load again without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


def check_plain(value: Any, where: str) -> None:
    """Refuse what `torch.load(weights_only=True)` would refuse later, when it is too late.

    Raises:
        TypeError: names the place in the state, its type, and what to store instead.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return
    kind = cast("Any", type(value))
    if kind in (dict, OrderedDict, Counter):
        for key, item in cast("Mapping[Any, Any]", value).items():
            if type(key) not in _PLAIN:
                check_plain(key, f"a key of {where}")
            if type(item) not in _PLAIN:
                check_plain(item, f"{where}[{key!r}]")
    elif kind in (list, tuple, set):
        for index, item in enumerate(cast("list[Any]", value)):
            if type(item) not in _PLAIN:
                check_plain(item, f"{where}[{index}]")
    else:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{where} is a {name}, which a checkpoint can't hold: loading it would run code. Store numbers, strings, "
            "tensors, and lists or dicts of them (a numpy array as a tensor or list, a path as a string)."
        )
