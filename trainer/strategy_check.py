"""The check of a user's own `Strategy`: an override that is misspelt, or takes other arguments, would not be one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from ..strategies.base import Strategy
from .misnomers import methods_of

# How alike a method's name and that of the base are where one is taken for the other, from 0 to 1.
_ALIKE = 0.8


def check_strategy(strategy: Strategy) -> None:
    """Refuse public methods that nobody would call, and overrides that can't be called as the base's are.

    Raises:
        TypeError: names the class, the method, and the one that was meant or the right signature.
    """
    kind = type(strategy)
    base = next(each for each in kind.__mro__ if each.__module__.startswith(_PACKAGE))
    for name, method in methods_of(kind, base):
        if name.startswith("_"):
            continue
        definition = getattr(base, name, None)
        if inspect.isfunction(definition):
            _check_arguments(kind, method, definition)
        elif definition is None:
            near = get_close_matches(name, [n for n in dir(base) if inspect.isfunction(getattr(base, n))], 1, _ALIKE)
            if near:
                raise TypeError(
                    f"{kind.__name__}.{name} would never be called: did you mean {near[0]!r}? A helper needs another name, "
                    "or one that begins with an underscore."
                )


_PACKAGE = Strategy.__module__.rpartition(".")[0] + "."


def _check_arguments(kind: type, method: Callable[..., Any], definition: Callable[..., Any]) -> None:
    """Every argument of the base's method must be taken: the trainer gives some by place and some by name."""
    expected, signature = inspect.signature(definition), inspect.signature(method)
    parameters = expected.parameters.values()
    places = [None for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        signature.bind(*places, **names)
    except TypeError:
        raise TypeError(
            f"{kind.__name__}.{method.__name__}{signature} can't take the arguments it is called with: expected {expected}."
        ) from None
