"""torch.compile around the step, and a count of what it compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, cast

import torch
from torch import nn

CompileOrder = Literal["off", "before_ddp", "after_ddp"]
# What the installed torch takes; what is compiled, and whether, is said elsewhere.
_OPTIONS = tuple(
    name for name in inspect.signature(cast("Any", torch.compile)).parameters if name not in ("model", "disable")
)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments that `torch.compile` does not take, or would pass over.

    Raises:
        ValueError: names what was probably meant.
    """
    for name in options:
        if name not in _OPTIONS:
            near = get_close_matches(name, _OPTIONS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_OPTIONS)}."
            raise ValueError(f"compile_options: torch.compile takes no {name!r}: {hint}")
    backend = options.get("backend", "inductor")
    if not callable(backend) and not isinstance(backend, str):
        raise ValueError(f"compile_options: backend={backend!r}: expected a name, or a function.")
    given = [name for name in ("mode", "options") if options.get(name) is not None]
    if given and backend != "inductor":
        raise ValueError(f"compile_options: {given[0]} is the inductor's; the backend {backend!r} takes none.")
    if len(given) == 2:
        raise ValueError("compile_options: a mode is a set of options: expected mode or options, not both.")


class CountedCompile:
    """Compiles a module in place, so that its class and the names of its parameters stay, and counts the graphs.

    Args:
        module: its forward is compiled at the first call, and again for inputs that the compiled code does not fit.
        options: arguments of `torch.compile`, checked.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self.graphs = 0
        """Graphs handed to the backend so far: with DDP one for each bucket, so that communication overlaps."""
        self._told = 0
        given = dict(options)
        backend = given.pop("backend", "inductor")
        mode, specific = given.pop("mode", None), given.pop("options", None)
        inner = _backend(backend, mode, specific, given.get("dynamic"))

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return inner(graph, inputs)

        module.compile(backend=counted, **given)

    def news(self, buckets: int) -> str:
        """What was compiled since the last call, and whether reductions overlap the backward; empty: nothing."""
        before, self._told = self._told, self.graphs
        if before == self.graphs:
            return ""
        if before:
            return (
                f"compile: {self.graphs - before} more, for inputs that the {before} before did not fit "
                "(TORCH_LOGS=recompiles says why)"
            )
        overlaps = self.graphs > 1 or buckets == 1
        return (
            f"compile: {self.graphs} graph{'s' * (self.graphs > 1)} for {buckets} bucket{'s' * (buckets > 1)}, "
            f"{'reductions overlap' if overlaps else 'no reduction overlaps'} the backward"
        )


def _backend(
    backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """What `torch.compile` would call with each graph."""
    if callable(backend):
        return backend
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)  # pyright: ignore
    try:
        found: Callable[..., Any] = torch._dynamo.lookup_backend(backend)  # pyright: ignore
    except Exception as error:
        raise ValueError(f"compile_options: backend={backend!r}: {error}") from error
    return found
