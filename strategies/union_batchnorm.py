"""BatchNorm over the union of all ranks' batches, on any backend: torch's SyncBatchNorm refuses CPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable  # pyright: ignore[reportUnknownVariableType]
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from .derived_class import Derived


@dataclass(frozen=True)
class Ranks:
    """Where a layer meets the same layer of the other ranks.

    Attributes:
        group: a process group for BatchNorm alone. On a group shared with DDP's buckets or with control words, the
            order of the collectives would depend on when a gradient gets ready or a word is due.
        layer: the layer's name in the model, for the collectives' names.
        named: called with a collective's name, gives the context it runs in: count it there, and explain its failure.
    """

    group: dist.ProcessGroup
    layer: str
    named: Callable[[str], AbstractContextManager[Any]]

    def all_gather(self, row: Tensor) -> Tensor:
        """Every rank's `row` [n], stacked: [ranks, n]."""
        rows = [torch.empty_like(row) for _ in range(self.group.size())]
        with self.named(f"batchnorm statistics of {self.layer}"):
            dist.all_gather(rows, row, self.group)
        return torch.stack(rows)

    def all_reduce(self, sums: Tensor) -> Tensor:
        """The sums over the ranks; this rank's own stay as they are."""
        totals = sums.clone()
        with self.named(f"batchnorm gradients of {self.layer}"):
            dist.all_reduce(totals, group=self.group)
        return totals


@dataclass(frozen=True)
class Statistics:
    """What the union's values are like, in float64; the same bits on every rank.

    Attributes:
        count: values per channel, over all ranks.
        mean: [channels].
        squares: [channels], the sum of squared distances to the mean.
    """

    count: float
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        """[channels], biased: what a batch is normalized by."""
        return self.squares / max(self.count, 1)


def _dims(input: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, input.dim())]


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (input.dim() - 2))


def union_statistics(input: Tensor, ranks: Ranks) -> Statistics:
    """Mean and squares over all ranks' `input` [batch, channels, *]; a rank's batch may be of any size, also 0.

    The parts are put together as Chan, Golub and LeVeque do (Updating formulae and a pairwise algorithm for computing
    sample variances, 1979): a mean of squares minus a square of means would cancel.
    """
    count, channels = input.numel() // input.shape[1], input.shape[1]
    row = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if count:
        # In float32 at least: a float16 holds neither a sum of many values nor a small variance.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, _dims(input), correction=0)
        row[0] = count
        row[1:] = torch.cat([mean, variance * count])
    rows = ranks.all_gather(row)
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    return Statistics(counts.sum().item(), mean, (squares + counts * (means - mean) ** 2).sum(0))


class Normalize(torch.autograd.Function):
    """Normalize `input` by the union's statistics, which depend on it, too: the backward counts that in.

    The gradient is that of the sum of all ranks' losses. DDP takes the mean over the ranks afterwards, for the layer's
    own weight and bias (whose gradients are this rank's share) as for all parameters before it. So a loss that is a
    mean over a rank's batch trains as on one rank with all the batches.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        ranks: Ranks,
    ) -> Tensor:
        """Shapes: input and result [batch, channels, *]; weight, bias [channels]."""
        ctx.save_for_backward(input, weight, statistics.mean, torch.rsqrt(statistics.variance + eps))
        ctx.count, ctx.ranks, ctx.bias_dtype = max(statistics.count, 1), ranks, bias.dtype if bias is not None else None
        dtype = torch.promote_types(input.dtype, torch.float32)
        given = [x if x is None else x.to(dtype) for x in (statistics.mean, statistics.variance, weight, bias)]
        # With statistics that are given, this is what evaluation does: torch's kernel, in the input's memory format.
        return F.batch_norm(input, *given, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With m the mean, s = 1/√(v + ε) and n the union's count: dx = w·s·(dy − Σdy/n − (x − m)·s²·Σ(dy·(x − m))/n)."""
        input, weight, mean, scale = ctx.saved_tensors
        dtype = torch.promote_types(input.dtype, torch.float32)
        dy = gradients[0].to(dtype)
        centered = input.to(dtype) - _per_channel(mean.to(dtype), input)
        sums = torch.stack([dy.sum(_dims(input)), (dy * centered).sum(_dims(input))]).double()
        d_weight = (sums[1] * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        d_input = None
        if ctx.needs_input_grad[0]:  # the same on all ranks, as DDP expects of every layer
            sum_dy, sum_dy_centered = ctx.ranks.all_reduce(sums) / ctx.count
            factor = scale if weight is None else scale * weight
            parts = (sum_dy, sum_dy_centered * scale**2, factor)
            sum_dy, slope, factor = (_per_channel(part.to(dtype), input) for part in parts)
            d_input = (factor * (dy - sum_dy - centered * slope)).to(input.dtype)
        return d_input, d_weight, d_bias, None, None, None


class UnionBatchNorm(Derived, _BatchNorm):
    """A BatchNorm layer that normalizes over the union of all ranks' batches; made by `sync_batchnorm.convert`.

    One all-gather of 2·channels + 1 numbers in forward, one all-reduce of 2·channels in backward; none in evaluation
    (also without running statistics, where each rank's batch stands for itself: ranks may evaluate different numbers of
    batches), and none in a group of one. In training, every rank must call the layer equally often, in the same order.

    Raises:
        ValueError: on a wrong shape, and, on every rank, if there is one value per channel in all batches together.
        RuntimeError: in a backward with `create_graph=True`: it has no second derivative.
    """

    prefix = "Union"
    own_attributes = ("ranks",)
    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` [batch, channels, *], a batch of this rank's own size, which may be 0."""
        if not self.training or self.ranks.group.size() == 1:
            return super().forward(input)
        return self._over_ranks(input)

    # torch.compile breaks its graph here, once: it would trace the collectives in pieces, and again for each new count.
    # (The public `torch.compiler.disable` would import the compiler together with this file.)
    @torch._disable_dynamo  # pyright: ignore
    def _over_ranks(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:  # before peers wait for a row of this rank
            raise ValueError(
                f"{self.ranks.layer}: expected {self.num_features} channels, received {input.shape[1]} "
                f"in an input of shape {list(input.shape)}."
            )
        with torch.no_grad():
            statistics = union_statistics(input, self.ranks)
            if statistics.count == 1:
                raise ValueError(
                    f"{self.ranks.layer}: expected more than 1 value per channel when training, received 1 over all "
                    f"{self.ranks.group.size()} ranks together (on this one, an input of shape {list(input.shape)}). "
                    "Use larger batches, or put the layer into evaluation."
                )
            self._track(statistics)
        return cast("Tensor", Normalize.apply(input, self.weight, self.bias, statistics, self.eps, self.ranks))

    def _track(self, statistics: Statistics) -> None:
        """Move the running statistics as torch's BatchNorm does: the variance unbiased; without momentum, a mean."""
        if not self.track_running_stats:
            return
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None or not statistics.count:
            return
        unbiased = statistics.squares / (statistics.count - 1)
        self.running_mean.lerp_(statistics.mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
