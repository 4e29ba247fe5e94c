"""Number formats of a run: which type parameters have, and which type the forward computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

_ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}
SUPPORTED = ("32-true", "64-true")
NOT_YET = ("bf16-mixed", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class Precision:
    """One of `32-true` (float32) and `64-true` (float64): parameters and computation alike."""

    name: str = "32-true"

    @classmethod
    def parse(cls, value: str | int) -> Precision:
        """Take Lightning's spellings: 32, "32", "32-true", 64, ….

        Raises:
            ValueError: the name is unknown, or its machinery is not there yet.
        """
        name = _ALIASES.get(str(value), str(value))
        if name in NOT_YET:
            raise ValueError(
                f"precision={value!r} is not supported yet: expected one of {', '.join(SUPPORTED)}. "
                "Mixed and half precision come with the AMP levers of DDPStrategy."
            )
        if name not in SUPPORTED:
            raise ValueError(f"precision={value!r}: expected one of {', '.join(SUPPORTED)} (or 32, 64).")
        return cls(name)

    @property
    def dtype(self) -> torch.dtype:
        """The type of floating-point parameters and buffers."""
        return torch.float64 if self.name == "64-true" else torch.float32

    @property
    def converts_batches(self) -> bool:
        """Whether floating-point tensors of a batch are brought to `dtype`, too."""
        return self.name == "64-true"

    def convert_module(self, module: torch.nn.Module) -> None:
        """Bring floating-point parameters and buffers to `dtype`, in place.

        Only 64-true converts: at 32-true a model that chose other types keeps them.
        """
        if self.name == "64-true":
            module.double()

    def autocast(self) -> AbstractContextManager[None]:
        """The context around forward and backward."""
        return _NOTHING


_NOTHING = nullcontext()
