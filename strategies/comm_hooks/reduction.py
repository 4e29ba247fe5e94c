"""Wires: how a flat tensor becomes its mean over a group. `Plain` sends it as it is, a `Codec` in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class Wire(ABC):
    """How a flat real floating-point tensor becomes its mean over a group."""

    @abstractmethod
    def mean(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the mean over the group, in the type of `tensor`: the same bits on every rank.

        Collective. `tensor` (shape [n], any n, the same on all ranks) may be overwritten. Waits on CPU; on CUDA the
        current stream waits.
        """


def checked_wire(wire: Wire) -> Wire:
    """The wire.

    Raises:
        TypeError: it is a class, a name, or something else.
    """
    if not isinstance(wire, Wire):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"wire={wire!r}: expected an object such as FP16(), BF16(), Int8() or Plain().")
    return wire


class Plain(Wire):
    """One all-reduce in the tensor's own type: what DDP does without a hook, to the bit."""

    def mean(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Divide, then sum: in this order half precision does not overflow on the way."""
        tensor.mul_(1 / group.size())
        dist.all_reduce(tensor, group=group)
        return tensor


class Codec(Wire):
    """A mean in two phases of encoded bytes.

    Each of the W ranks becomes the owner of one of W chunks, gets it from everyone (all-to-all), decodes, averages in
    float32 (float64 for float64), encodes the mean, and gives it to everyone (all-gather). All ranks decode the same
    bytes, so they hold the same bits; and no sum is ever rounded to the codec's few bits. With more than two ranks
    a value is encoded twice on its way: the error of the mean is at most the mean of the errors of the first encodings,
    plus that of the second. Two ranks exchange everything at once, encoded once.
    """

    block: ClassVar[int]
    """Chunks are a multiple of so many values."""

    @abstractmethod
    def encode(self, chunks: Tensor) -> Tensor:
        """Encode each row of `chunks` (float32 or float64 [rows, n·block]) as bytes: uint8 [rows, bytes]."""

    @abstractmethod
    def decode(self, encoded: Tensor, kind: torch.dtype) -> Tensor:
        """Decode what `encode` returned for chunks of the type `kind`."""

    def mean(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the mean, in four messages of a Wth each; between two ranks in one; `tensor` is left as it is."""
        size, length = group.size(), tensor.numel()
        if size == 1 or length == 0:
            return tensor
        kind = torch.promote_types(tensor.dtype, torch.float32)
        parts = 1 if size == 2 else size
        padding = -length % (parts * self.block)
        chunks = functional.pad(tensor.to(kind), (0, padding)) if padding else tensor.to(kind)
        sent = self.encode(chunks.view(parts, -1))
        if size == 2:  # to exchange the whole takes as many bytes, half the messages, and one encoding
            both = sent.new_empty(2, sent.numel())
            dist.all_gather(list(both.unbind()), sent.squeeze(0), group=group)
            mean, other = self.decode(both, kind)
            return mean.add_(other).div_(2)[:length].to(tensor.dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        share = self.decode(received, kind).sum(0, keepdim=True).div_(size)
        dist.all_gather(list(sent.unbind()), self.encode(share).squeeze(0), group=group)
        return self.decode(sent, kind).view(-1)[:length].to(tensor.dtype)
