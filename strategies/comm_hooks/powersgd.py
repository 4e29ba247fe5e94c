"""`PowerSGD`: gradients as products of two thin matrices, with error feedback and warm start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .hook import HookContext
from .ordered import Bucket, OrderedHook
from .reduction import Plain, Wire, checked_wire


class PowerSGD(OrderedHook):
    """Low-rank gradient compression: Vogels, Karimireddy, Jaggi 2019, https://arxiv.org/abs/1905.13727.

    Algorithm 1, one step of power iteration on the mean gradient of each parameter, seen as a matrix M of shape [n, m]:

        P ← mean(M·Q);  P ← orthogonal basis of P;  Q ← mean(Mᵀ·P);  gradient ← P·Qᵀ

    with Q of shape [m, rank] from the step before (warm start), and algorithm 2, error feedback: each rank adds to M
    what the step before left out of its own, M − P·Qᵀ. Instead of n·m numbers, (n+m)·rank are sent; parameters of one
    dimension, and those where this is no less, are sent as they are. A bucket takes two messages: all P and what is not
    compressed; then all Q.

    State is kept by the parameter's name: the errors, as large as the gradients and different on each rank, and the Q.
    On two ranks with the plain wire, a run resumed from it continues to the bit.

    A step with inf or NaN gives gradients of NaN, which a gradient scaler sees, and forgets the errors of the bucket:
    they would be NaN for ever. Errors are in the units of the loss: when a gradient scaler changes its scale, those of
    the step before are off by its factor, once.

    Args:
        rank: the columns of P and Q. More is closer to the gradient, and more to send.
        start_step: steps with the plain mean first. The first gradients change fastest and have the highest rank, and
            weights follow them furthest: a few exact steps cost next to nothing. Backwards that synchronize are counted,
            those of skipped steps too: on all ranks the same.
        wire: how P, Q, and what is not compressed become their mean.
    """

    lanes: ClassVar[int] = 2

    def __init__(self, rank: int = 4, *, start_step: int = 10, wire: Wire | None = None) -> None:
        if not isinstance(rank, int) or rank < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"rank={rank!r}: expected 1 or more columns; 4 is a good start.")
        if start_step < 0:
            raise ValueError(f"start_step={start_step}: expected 0 or more steps with the plain mean.")
        super().__init__()
        self.rank = rank
        self.start_step = start_step
        self.wire = Plain() if wire is None else checked_wire(wire)
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}

    def setup(self, context: HookContext) -> None:
        """Start anew: no errors, and Q by chance."""
        super().setup(context)
        self.errors, self.factors = {}, {}

    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        """Both algorithms, for one bucket."""
        compressing = bucket.step >= self.start_step
        narrow = [compressing and self.compresses(gradient) for gradient in bucket.gradients]
        if not any(narrow):
            return self.wire.mean(bucket.flat, group)
        gradients = [gradient for gradient, yes in zip(bucket.gradients, narrow, strict=True) if yes]
        rest = [gradient for gradient, yes in zip(bucket.gradients, narrow, strict=True) if not yes]
        names = [self._name(parameter) for parameter, yes in zip(bucket.parameters, narrow, strict=True) if yes]

        # M, in the bucket itself where its type is good enough to compute in
        kind = torch.promote_types(bucket.flat.dtype, torch.float32)
        matrices = [gradient.flatten(1).to(kind) for gradient in gradients]
        errors = [self._error(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        for matrix, error in zip(matrices, errors, strict=True):
            matrix.add_(error)

        # P, together with what is not compressed
        before = [self._factor(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        products = [matrix @ factor for matrix, factor in zip(matrices, before, strict=True)]
        *means, others = self._mean_of([*products, _flat(rest, bucket.flat).to(kind)], group)
        finite = _finite(means)
        bases = orthogonal([torch.where(finite, mean, 0) for mean in means])

        # Q
        after = self._mean_of([matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)], group)
        finite = finite & _finite(after)

        # P·Qᵀ, and what it leaves out. On CUDA a branch would wait for the device, so NaN is arithmetic, too.
        for name, gradient, matrix, basis, old, factor in zip(
            names, gradients, matrices, bases, before, after, strict=True
        ):
            seen = torch.where(finite, factor, torch.nan)
            error = torch.addmm(matrix, basis, seen.T, alpha=-1, out=self.errors[name])
            error.masked_fill_(~finite, 0)
            torch.mm(basis, seen.T, out=matrix)
            if matrix.dtype != gradient.dtype:
                gradient.copy_(matrix.view_as(gradient))
            self.factors[name] = torch.where(finite, factor, old)
        start = 0
        for gradient in rest:
            gradient.copy_(others[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return bucket.flat

    def compresses(self, gradient: Tensor) -> bool:
        """Whether it has rows and columns, and both factors together are smaller than it."""
        if gradient.ndim < 2 or gradient.is_complex():
            return False
        rows = gradient.shape[0]
        columns = gradient[0].numel() if rows else 0
        return (rows + columns) * self.rank < rows * columns

    def state_dict(self) -> dict[str, Any]:
        """`step`, and by the parameters' names `errors` ([n, m] each) and `factors` (Q, [m, rank] each)."""
        return {"step": self.step, "errors": dict(self.errors), "factors": dict(self.factors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. What has another shape now starts anew."""
        self.step = int(state["step"])
        device = self.context.device
        self.errors = {name: cast("Tensor", tensor).to(device, copy=True) for name, tensor in state["errors"].items()}
        self.factors = {name: cast("Tensor", tensor).to(device, copy=True) for name, tensor in state["factors"].items()}

    def _name(self, parameter: Tensor) -> str:
        name = self.context.names.get(id(parameter))
        if name is None:
            raise RuntimeError(
                f"PowerSGD got the gradient of a parameter of shape {list(parameter.shape)} whose name it was not told: "
                "the model got it after setup. Call setup again with a context of the model as it is."
            )
        return name

    def _error(self, name: str, matrix: Tensor) -> Tensor:
        error = self.errors.get(name)
        if error is None or error.shape != matrix.shape or error.dtype != matrix.dtype:
            error = self.errors[name] = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
        return error

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """Q of the step before, or a random one: the same on all ranks, since it depends on the name only."""
        shape = (matrix.shape[1], self.rank)
        factor = self.factors.get(name)
        if factor is None or factor.shape != shape or factor.dtype != matrix.dtype:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
            generator = torch.Generator().manual_seed(seed)
            factor = torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix)
        return factor

    def _mean_of(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """The means of tensors of one type, in one message."""
        flat = self.wire.mean(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
        parts = cast("tuple[Tensor, ...]", flat.split([tensor.numel() for tensor in tensors]))
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis [n, r] of the columns of each matrix [n, r], n ≥ r; those of one shape at once.

    Householder QR: the same bits for the same matrix, alone or with others. Columns that depend on each other are
    completed, so a zero matrix has a basis, too, and no column is lost for ever.
    """
    shapes: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        shapes.setdefault(matrix.shape, []).append(index)
    bases: dict[int, Tensor] = {}
    for indices in shapes.values():
        batch = cast("Tensor", torch.linalg.qr(torch.stack([matrices[index] for index in indices])).Q)
        bases.update(zip(indices, batch.unbind(), strict=True))
    return [bases[index] for index in range(len(matrices))]


def _finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all are finite, as a tensor on their device. They are means, so all ranks find the same."""
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)
