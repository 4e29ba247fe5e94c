"""`Compressed`: every bucket over a wire."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from .ordered import Bucket, OrderedHook
from .reduction import Wire, checked_wire


class Compressed(OrderedHook):
    """The mean of each bucket over a wire, such as `FP16()`, `BF16()` or `Int8()`. It has no state."""

    lanes: ClassVar[int] = 2

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = checked_wire(wire)

    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        """The wire's mean."""
        return self.wire.mean(bucket.flat, group)
