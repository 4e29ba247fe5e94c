"""`Compressed`: every bucket over a wire."""

from __future__ import annotations

from torch import Tensor

from .ordered import Bucket, OrderedHook
from .reduction import Wire


class Compressed(OrderedHook):
    """The mean of each bucket over a wire, such as `FP16()`, `BF16()` or `Int8()`. It has no state."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def mean(self, bucket: Bucket) -> Tensor:
        """The wire's mean."""
        return self.wire.mean(bucket.flat, self.context.group)
