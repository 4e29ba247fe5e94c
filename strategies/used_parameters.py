"""The dry run before the first reduction: which parameters does the loss depend on, on which rank?

DistributedDataParallel waits for a gradient of every parameter. Where one rank has none, that rank finds out in the next
forward, by number; where the others have one, they wait until the timeout. Here all are told by name, before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .activation_checkpointing import find_reentrant_checkpoint
from .autograd_graph import reached_parameters

Told = tuple[list[str], bool]


class UsedParameters:
    """Looks at the graph of the first loss whose backward reduces, and compares what all ranks found."""

    def __init__(
        self, module: nn.Module, *, finds_unused: bool, static_graph: bool, ignored: Iterable[str] = ()
    ) -> None:
        self._finds_unused, self._static_graph = finds_unused, static_graph
        left_out = set(ignored)
        self._trainable = [
            (name.removeprefix("task."), id(parameter))
            for name, parameter in cast("Iterable[tuple[str, nn.Parameter]]", module.named_parameters())
            if parameter.requires_grad and name not in left_out
        ]

    def check(self, loss: Tensor, gather_objects: Callable[..., list[Any]]) -> None:
        """Compare the ranks. All of them must call it; the graph is left as it is.

        Raises:
            RuntimeError: on every rank, naming the parameters that would be waited for, and the switch to set.
        """
        reentrant = find_reentrant_checkpoint(loss)
        if reentrant:  # what is inside is not in the graph yet: nothing can be said of it
            unused: list[str] = []
        else:
            reached = reached_parameters(loss)
            unused = [name for name, key in self._trainable if key not in reached]
        told: list[Told] = gather_objects((unused, reentrant), name="used parameters")
        if any(found for _, found in told) and not self._static_graph:
            raise RuntimeError(
                "the step uses a reentrant checkpoint, with which DDP reduces wrong gradients or fails. Use "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or DDPStrategy(static_graph=True)."
            )
        if not self._finds_unused:
            self._judge([names for names, _ in told])

    def _judge(self, unused: Sequence[Sequence[str]]) -> None:
        nowhere = [name for name in unused[0] if all(name in names for names in unused)]
        somewhere: dict[str, list[str]] = {}
        for rank, names in enumerate(unused):
            for name in names:
                if name not in nowhere:
                    somewhere.setdefault(name, []).append(str(rank))
        found = ", ".join(nowhere if not self._static_graph else [])
        found += "".join(f", {name} (on rank {' and '.join(ranks)})" for name, ranks in somewhere.items())
        if found:
            raise _unused(found.removeprefix(", "))


def check_reduced(model: DistributedDataParallel) -> None:
    """See, between backward and optimizer step, that every gradient of a wrapped model was reduced.

    Raises:
        RuntimeError: on the rank that lacks one, naming its parameter; the others wait for it.
    """
    try:
        # The first thing it does is to see whether the last reduction was finished. The rebuilding itself, once in
        # a run, would be done at the start of the next forward.
        if model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True  # pyright: ignore[reportPrivateUsage]
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        # torch's message has indices. (Whether `.grad` is None says nothing: with views into the bucket it is not.)
        named = cast("Iterable[tuple[str, nn.Parameter]]", model.module.named_parameters())
        trainable = [name.removeprefix("task.") for name, parameter in named if parameter.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = ", ".join(trainable[int(index)] for index in found[1].split()) if found else "(torch does not say)"
        raise _unused(names, f"rank {dist.get_rank()}: ") from error


def _unused(names: str, where: str = "") -> RuntimeError:
    return RuntimeError(
        f"{where}the loss did not depend on these parameters in this step: {names}. The other ranks would wait for their "
        "gradients. If that is meant, use DDPStrategy(find_unused_parameters=True); if they are never used, remove or "
        "freeze them (requires_grad_(False))."
    )
