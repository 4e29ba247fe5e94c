"""Codecs: FP16 and BF16 halve float32 gradients, Int8 brings them to a quarter."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .reduction import Codec


class BF16(Codec):
    """bfloat16: the range of float32 in 2 bytes, with 8 bits of precision.

    Relative error of an encoding: at most 2⁻⁸ (0.4 %). inf and NaN pass through. Of float64, what is outside of
    float32's range becomes inf or 0.
    """

    block: ClassVar[int] = 8

    def encode(self, chunks: Tensor) -> Tensor:
        """Round to the nearest."""
        return chunks.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, kind: torch.dtype) -> Tensor:
        """Widen."""
        return encoded.view(torch.bfloat16).to(kind)


class ScaledBlocks(Codec):
    """Values in a narrow type, each block of 512 with a scale of its own, which brings its peak to `limit`.

    A row is encoded as the scales, in the type of the chunks, followed by the values.
    """

    block: ClassVar[int] = 512
    number: ClassVar[torch.dtype]
    limit: ClassVar[float]

    def encode(self, chunks: Tensor) -> Tensor:
        """Find the peaks, then scale the values to them."""
        values = chunks.view(chunks.shape[0], -1, self.block)
        # Not abs().amax(): this is half the time, since it writes nothing. NaN comes through.
        peaks = torch.maximum(values.amax(2, keepdim=True), values.amin(2, keepdim=True).neg_())
        # Not 0 for a block of zeros, nor so small that its inverse is inf.
        scales = self.scales(peaks, (peaks / self.limit).clamp_(min=torch.finfo(chunks.dtype).tiny))
        encoded = torch.empty(
            chunks.shape[0],
            scales[0].numel() * scales.element_size() + values[0].numel() * self.number.itemsize,
            dtype=torch.uint8,
            device=chunks.device,
        )
        scales_out, values_out = self._parts(encoded, chunks.dtype)
        scales_out.copy_(scales)
        self.write(values, scales.reciprocal(), values_out)
        return encoded

    def decode(self, encoded: Tensor, kind: torch.dtype) -> Tensor:
        """Value times scale. Widened first: a product of two types takes twice the time on the CPU."""
        scales, values = self._parts(encoded, kind)
        return values.to(kind).mul_(scales).view(encoded.shape[0], -1)

    @abstractmethod
    def scales(self, peaks: Tensor, scales: Tensor) -> Tensor:
        """Correct the scales of blocks whose peak is not finite."""

    @abstractmethod
    def write(self, values: Tensor, inverse: Tensor, out: Tensor) -> None:
        """Write values · inverse as `number` to `out`."""

    def _parts(self, encoded: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """Views of the scales [rows, blocks, 1] and the values [rows, blocks, block]."""
        blocks = encoded.shape[1] // (kind.itemsize + self.block * self.number.itemsize)
        split = blocks * kind.itemsize
        scales, values = encoded[:, :split].view(kind), encoded[:, split:].view(self.number)
        return scales.view(-1, blocks, 1), values.view(-1, blocks, self.block)


class FP16(ScaledBlocks):
    """float16 with a scale per block: 2 bytes a value, 11 bits of precision, and the whole range of float32.

    Error of an encoding: at most 2⁻¹¹ (0.05 %) of the value, plus 2⁻⁴⁰ of the block's peak. Without the scale, 70000
    would be inf and 1e-8 would be 0. inf and NaN pass through; in a block that has one, values above 65504 become inf.
    """

    number: ClassVar[torch.dtype] = torch.float16
    limit: ClassVar[float] = 2.0**15

    def scales(self, peaks: Tensor, scales: Tensor) -> Tensor:
        """1 beside inf and NaN: inf · 0 would be NaN, and the others must not vanish."""
        return torch.where(peaks.isfinite(), scales, 1)

    def write(self, values: Tensor, inverse: Tensor, out: Tensor) -> None:
        """Multiply, and round to the nearest."""
        out.copy_(values * inverse)


class Int8(ScaledBlocks):
    """8 bits with a scale per block: 1 byte a value.

    Error of an encoding: at most peak/254, where peak is the largest magnitude of the block of 512, whatever the value:
    a value below it becomes 0. A block with inf or NaN becomes NaN as a whole, so that a gradient scaler sees it.
    """

    number: ClassVar[torch.dtype] = torch.int8
    limit: ClassVar[float] = 127.0

    def scales(self, peaks: Tensor, scales: Tensor) -> Tensor:
        """NaN for inf, which is inf − inf."""
        return scales + (peaks - peaks)

    def write(self, values: Tensor, inverse: Tensor, out: Tensor) -> None:
        """Multiply, round to the nearest, narrow."""
        out.copy_((values * inverse).round_())
