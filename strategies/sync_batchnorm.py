"""BatchNorm layers to layers that normalize over all ranks, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.lazy import LazyModuleMixin

from .derived_class import Derived, derive, restore
from .union_batchnorm import Ranks, UnionBatchNorm


class TorchSyncBatchNorm(Derived, nn.SyncBatchNorm):
    """torch's SyncBatchNorm in the place of a BatchNorm layer."""

    prefix = "Sync"
    own_attributes = ("process_group",)


def convert(
    module: nn.Module,
    group: dist.ProcessGroup,
    device_type: str,
    named: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> nn.Module:
    """Make every BatchNorm1d, 2d and 3d in `module`, itself included, normalize over all ranks' batches.

    In place: each layer remains the object it was, with its tensors, hooks, names and shared uses; only its class
    becomes one derived from its own. So optimizers built before stay valid, and whoever holds a layer holds the right
    one. On CUDA the layers compute by torch's SyncBatchNorm, elsewhere by `UnionBatchNorm`. InstanceNorm and GroupNorm
    are left alone, and on CUDA a SyncBatchNorm that is there already. To convert again, with another group, is fine.

    A forward in training mode is a collective from now on: every rank must run it, and its backward, equally often.
    What lets ranks take different numbers of steps (uneven inputs with shadow steps, torch's Join), or lets one leave
    out a forward, can't be used with it.

    Args:
        module: the model, or the step that holds it.
        group: for these layers alone (see `Ranks`), of a backend for the tensors' device. Of one rank: plain BatchNorm.
        device_type: where the model runs, "cpu" or "cuda".
        named: called with the name of each collective, gives the context it runs in. Not used by torch's SyncBatchNorm.

    Returns:
        `module`.

    Raises:
        ValueError: naming the layer: it is lazy, it has a `forward` of its own, or it is torch's SyncBatchNorm while
            the model runs elsewhere than on CUDA. Nothing is converted then.
    """
    revert(module)
    layers = dict(_layers(module, device_type))
    for name, layer in layers.items():
        _check(name, layer)
    for name, layer in layers.items():
        if device_type == "cuda":
            derive(layer, TorchSyncBatchNorm)
            vars(layer)["process_group"] = group
        else:
            derive(layer, UnionBatchNorm)
            vars(layer)["ranks"] = Ranks(group, name, named)
    return module


def revert(module: nn.Module) -> nn.Module:
    """Undo `convert`, in place: ordinary BatchNorm layers, to export or to run in one process. Returns `module`."""
    for layer in module.modules():
        if isinstance(layer, UnionBatchNorm | TorchSyncBatchNorm):
            restore(layer)
    return module


def _layers(module: nn.Module, device_type: str) -> Iterator[tuple[str, nn.Module]]:
    named_modules = cast("Iterator[tuple[str, nn.Module]]", module.named_modules())
    for name, layer in named_modules:
        if isinstance(layer, _BatchNorm) and not (device_type == "cuda" and isinstance(layer, nn.SyncBatchNorm)):
            yield name or type(layer).__name__, layer


def _check(name: str, layer: nn.Module) -> None:
    kind = type(layer).__name__
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(
            f"{name}: expected a BatchNorm with its number of channels, received a {kind} that has seen no batch yet. "
            "Run one batch through the model before, or give num_features."
        )
    if isinstance(layer, nn.SyncBatchNorm):
        raise ValueError(
            f"{name}: expected a BatchNorm, received torch's {kind}, which trains on CUDA only. "
            "Write the BatchNorm it stands for; sync_batchnorm=True converts it."
        )
    if isinstance(layer, Derived):
        raise ValueError(
            f"{name}: expected an ordinary BatchNorm, received a {kind}. To recompute one by itself saves nothing, since its "
            "input is kept either way: in checkpoint_activations, select the block around it, or other modules."
        )
    if type(layer).forward is not _BatchNorm.forward or "forward" in vars(layer):
        raise ValueError(
            f"{name}: expected BatchNorm1d, 2d, 3d or a subclass with the same `forward`, received a {kind} with a "
            "`forward` of its own, which would be lost. Take the BatchNorm out of it, as a layer it calls, or leave "
            "out sync_batchnorm."
        )
