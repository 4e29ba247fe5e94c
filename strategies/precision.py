"""Number formats of a run: which type parameters have, and which type the forward computes in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

NAMES = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
_ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
_STORED = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_COMPUTED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Precision:
    """One of

    `32-true`, `64-true`    parameters and computation in float32 or float64;
    `bf16-mixed`            parameters in float32, the forward under autocast to bfloat16;
    `16-mixed`              parameters in float32, the forward under autocast to float16, the loss scaled so that small
                            gradients don't vanish (`torch.amp.GradScaler`): steps with inf or NaN are skipped;
    `bf16-true`, `16-true`  parameters, batches and computation in bfloat16 or float16: half the memory, but small
                            updates are lost in rounding, and nothing scales the loss.
    """

    name: str = "32-true"

    @classmethod
    def parse(cls, value: str | int) -> Precision:
        """Take Lightning's spellings: 32, "32", "32-true", 64, "bf16" (bf16-mixed), 16 (16-mixed), ….

        Raises:
            ValueError: the name is unknown.
        """
        name = _ALIASES.get(str(value), str(value))
        if name not in NAMES:
            raise ValueError(f"precision={value!r}: expected one of {', '.join(NAMES)} (or 32, 64, 16, 'bf16').")
        return cls(name)

    @property
    def dtype(self) -> torch.dtype:
        """The type of floating-point parameters and buffers."""
        return _STORED.get(self.name, torch.float32)

    @property
    def converts_batches(self) -> bool:
        """Whether floating-point tensors of a batch are brought to `dtype`, too."""
        return self.name in _STORED

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, and steps may be skipped."""
        return self.name == "16-mixed"

    def convert_module(self, module: nn.Module) -> None:
        """Bring floating-point parameters and buffers to `dtype`, in place. torchmetrics objects count on in float32.

        Only 64-true, bf16-true and 16-true convert: at 32-true a model that chose other types keeps them.
        """
        if self.name not in _STORED:
            return
        dtype = self.dtype
        for child in _without_metrics(module):
            for parameter in child.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in list(child.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(child, name, buffer.to(dtype))

    @property
    def computes(self) -> torch.dtype | None:
        """The type that autocast brings the forward to; None: that of its inputs."""
        return _COMPUTED.get(self.name)

    def make_scaler(self, device_type: str) -> torch.amp.GradScaler | None:
        """The scaler of the loss; None where nothing is scaled."""
        return torch.amp.GradScaler(device_type) if self.scales_loss else None


def _without_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it, but for torchmetrics objects: sums in half precision would be wrong numbers."""
    # Such an object can only come from a program that imported torchmetrics; we need not.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(module, torchmetrics.Metric):
        return
    yield module
    for child in module.children():
        yield from _without_metrics(child)
