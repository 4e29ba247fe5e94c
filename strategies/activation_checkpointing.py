"""Activation checkpointing that is safe under DDP: activations are computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from .autograd_graph import nodes
from .derived_class import Derived, derive


class _RunningStatisticsKept:
    """While it is entered, the norm layers in `module` count on copies of their buffers.

    Without it, a BatchNorm would see each batch twice: in forward, and when it is recomputed. The output does not depend
    on the buffers in training, so the copies may hold what the forward has made of them. They are swapped, not written
    back: a write would invalidate what autograd has saved. It can be entered again, by another backward of one graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        for module in self._module.modules():
            if isinstance(module, _NormBase) and module.training:
                buffers: dict[str, Tensor | None] = vars(module)["_buffers"]
                self._kept.append((buffers, dict(buffers)))
                buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *error: object) -> None:
        while self._kept:
            buffers, kept = self._kept.pop()
            buffers.update(kept)


class Recomputed(Derived, nn.Module):
    """A module whose inner activations are computed again in backward; made by `checkpoint_activations`."""

    prefix = "Recomputed"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; only its inputs are kept for the backward."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        # A compiled graph writes each buffer once by itself, and takes no contexts.
        options: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": self._contexts}
        return cast("Any", checkpoint(super().forward, *args, use_reentrant=False, **options, **kwargs))

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _RunningStatisticsKept(self)


def checkpoint_activations(
    module: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
) -> int:
    """Let the selected submodules of `module` compute their activations again in backward, instead of keeping them.

    Memory falls to the selected modules' inputs plus what one of them needs at a time; a step does their forward twice.
    Gradients are the same, bit by bit, dropout included. In place, before the model is wrapped or compiled: each module
    remains the object it was, with its names in the state dict and its hooks. Hooks on modules inside run twice.

    Always with `use_reentrant=False`. The reentrant kind runs a backward inside the backward, which DDP does not see
    through: a layer used twice gets another gradient on each rank, without an error.

    Running statistics of BatchNorm move once. Other buffers that a forward changes would be changed twice, and be
    recomputed from what they have become (spectral_norm, codebooks): leave such modules out.

    Args:
        module: the model. It is not selected itself.
        kinds: one or several classes, or a function that says whether a module is selected. What lies inside a selected
            module is recomputed with it, and not selected again.

    Returns:
        The number of modules selected; one used in several places counts once.

    Raises:
        ValueError: nothing was selected, or a selected module is recomputed already, or has a `forward` set on the
            object. Nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> checkpoint_activations(model, nn.Linear)
        2
    """
    chosen: Callable[[nn.Module], bool] = (lambda m: isinstance(m, kinds)) if isinstance(kinds, type | tuple) else kinds
    selected: dict[nn.Module, str] = {}
    _select(module, "", chosen, selected)
    if not selected:
        present = ", ".join(sorted({type(m).__name__ for m in module.modules() if m is not module})) or "none"
        raise ValueError(
            f"checkpoint_activations: expected kinds={_described(kinds)} to select submodules of "
            f"{type(module).__name__}, received no match. Its submodules' classes: {present}."
        )
    if twice := [name for m, name in selected.items() if isinstance(m, Derived)]:
        raise ValueError(
            f"checkpoint_activations: expected modules as their class made them, received {', '.join(twice)}, already "
            "recomputed or converted. Call it once, before the strategy wraps the model."
        )
    if patched := [name for m, name in selected.items() if "forward" in vars(m)]:
        raise ValueError(
            f"checkpoint_activations: expected `forward` to be a method of the class, received one set on the object for "
            f"{', '.join(patched)} (torch.compile does that). Call it before you compile or patch."
        )
    for submodule in selected:
        derive(submodule, Recomputed)
    return len(selected)


def _select(parent: nn.Module, path: str, chosen: Callable[[nn.Module], bool], selected: dict[nn.Module, str]) -> None:
    for name, child in parent.named_children():
        if chosen(child):
            selected.setdefault(child, path + name)
        else:
            _select(child, f"{path}{name}.", chosen, selected)


def _described(kinds: Any) -> str:
    if isinstance(kinds, tuple):
        return "(" + ", ".join(_described(kind) for kind in kinds) + ")"  # pyright: ignore[reportUnknownVariableType]
    return getattr(kinds, "__qualname__", repr(kinds))


def find_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether a reentrant `torch.utils.checkpoint` lies between the parameters and `loss`; see `checkpoint_activations`.

    Visits every node of the autograd graph once, a few microseconds each: for a first step, not for every one. It does
    not look inside a reentrant checkpoint, nor need to. A loss without a graph has none.
    """
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes(loss))
