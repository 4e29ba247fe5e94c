"""Codecs keep their bounds, and the mean over a wire is what its definition says, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from run_ranks import run_ranks
from samestep.strategies.comm_hooks import BF16, FP16, Codec, Int8, Plain
from torch import Tensor
from torch.nn.functional import pad

CODECS = [FP16(), BF16(), Int8()]


def through(codec: Codec, values: Tensor) -> Tensor:
    """Encoded and decoded."""
    padded = pad(values, (0, -len(values) % codec.block)).unsqueeze(0)
    return codec.decode(codec.encode(padded), values.dtype)[0, : len(values)]


def made_up(length: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(length, generator=generator, dtype=torch.float64)
    return (numbers * (4 * torch.randn(length, generator=generator, dtype=torch.float64)).exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_keeps_its_bound(dtype: torch.dtype) -> None:
    values = made_up(512 * 40, 0, dtype)
    peaks = values.view(-1, 512).abs().amax(1, keepdim=True)
    error = (through(Int8(), values) - values).view(-1, 512).abs()
    assert (error <= peaks / 254 * (1 + 1e-5)).all()
    assert (error > peaks / 300).any(), "the bound is far from what happens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 7e4, 1e30])
def test_fp16_keeps_its_bound_at_every_magnitude(magnitude: float, dtype: torch.dtype) -> None:
    values = magnitude * made_up(512 * 40, 1, dtype)
    peaks = values.view(-1, 512).abs().amax(1, keepdim=True)
    error = (through(FP16(), values) - values).view(-1, 512).abs()
    assert (error <= values.view(-1, 512).abs() * 2**-11 * (1 + 1e-3) + peaks * 2**-40).all()


def test_bf16_keeps_its_bound() -> None:
    values = made_up(512 * 40, 2, torch.float32)
    assert ((through(BF16(), values) - values).abs() <= values.abs() * 2**-8).all()


def test_fp16_neither_overflows_nor_vanishes() -> None:
    """torch's fp16 hook makes inf of 70000 and 0 of 1e-8."""
    for number in (70000.0, 1e-8, 3e38, 1e-37):
        assert through(FP16(), torch.tensor([number, 0.0])).tolist() == pytest.approx([number, 0.0], rel=1e-3)
    # Side by side in one block, too.
    assert through(FP16(), torch.tensor([70000.0, 1e-3])).tolist() == pytest.approx([70000.0, 1e-3], rel=1e-3)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_the_smallest_numbers(codec: Codec, dtype: torch.dtype) -> None:
    assert torch.equal(through(codec, torch.zeros(1024, dtype=dtype)), torch.zeros(1024, dtype=dtype))
    tiny = torch.tensor([1e-45, -3e-40, 1e-38], dtype=dtype)
    assert ((through(codec, tiny) - tiny).abs() <= 1e-37).all()
    largest = torch.tensor([3.3e38, -3.3e38], dtype=dtype)
    assert through(codec, largest).isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_never_comes_out_finite(codec: Codec, number: float) -> None:
    values = made_up(2048, 3, torch.float32)
    values[600] = number
    result = through(codec, values)
    assert not result[600].isfinite()
    if isinstance(codec, Int8):
        assert result[512:1024].isnan().all(), "a wrong finite number beside it"
    else:
        assert torch.equal(result[600], values[600]) or math.isnan(number)
        finite = torch.arange(2048) != 600
        torch.testing.assert_close(result[finite], values[finite], rtol=2**-8, atol=1e-4)
    assert result[:512].isfinite().all()
    assert result[1024:].isfinite().all()


LENGTHS = [0, 1, 2, 511, 1024, 1025, 5000]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def means_over_ranks(codec: Codec) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    return [
        codec.mean(made_up(length, dist.get_rank(), dtype), group) for dtype in TYPES for length in LENGTHS
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_a_mean_over_ranks_is_its_definition_to_the_bit(codec: Codec, ranks: int) -> None:
    several = run_ranks(means_over_ranks, ranks, codec)
    kinds = [(dtype, length) for dtype in TYPES for length in LENGTHS]
    for index, (dtype, length) in enumerate(kinds):
        kind = torch.promote_types(dtype, torch.float32)
        # Blocks begin at multiples of `block` in each chunk, as they do in the whole.
        if length == 0:
            assert several[0][index].shape == (0,)
            continue
        sent = [through(codec, made_up(length, rank, dtype).to(kind)) for rank in range(ranks)]
        mean = torch.stack(sent).sum(0) / ranks
        expected = (mean if ranks == 2 else through(codec, mean)).to(dtype)
        for rank in range(ranks):
            assert torch.equal(several[rank][index].nan_to_num(), expected.nan_to_num()), (dtype, length, rank)
            assert several[rank][index].dtype == dtype


def plain_mean() -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return Plain().mean(torch.full((3,), 40000.0, dtype=torch.float16), group)


def test_a_plain_mean_of_halves_does_not_overflow() -> None:
    assert [mean.tolist() for mean in run_ranks(plain_mean, 2)] == [[40000.0] * 3] * 2
