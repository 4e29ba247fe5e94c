"""PowerSGD against a reference that emulates all ranks in one process."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooked import batch, flat_gradients, in_ddp, layers, local_gradients, loss_of, train
from run_ranks import errors_of_ranks, run_ranks
from samestep.strategies.comm_hooks import FP16, Int8, Plain, PowerSGD, Wire
from samestep.strategies.comm_hooks.powersgd import orthogonal
from tasks import parameters_of
from torch import Tensor, nn


class Reference:
    """Algorithms 1 and 2 of Vogels et al. 2019 for one parameter, with the matrices of all ranks at hand.

    The basis of P enters as its projector, P·(PᵀP)⁻¹·Pᵀ: no QR, so nothing is shared with what is tested.
    """

    def __init__(self, name: str, rank: int, columns: int) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        generator = torch.Generator().manual_seed(seed)
        self.span = torch.randn(columns, rank, generator=generator, dtype=torch.float64)  # of Q: all that matters
        self.errors: list[Tensor] | None = None

    def mean(self, gradients: list[Tensor]) -> Tensor:
        errors = self.errors or [torch.zeros_like(gradient) for gradient in gradients]
        matrices = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        mean = torch.stack(matrices).mean(0)
        product = mean @ self.span
        projector = product @ torch.linalg.inv(product.T @ product) @ product.T
        result = projector @ mean
        self.errors = [matrix - result for matrix in matrices]
        # Q = Mᵀ·(orthonormal P); another basis of the same columns gives the same projector in the next step.
        self.span = torch.linalg.svd(result.T, full_matrices=False).U[:, : self.span.shape[1]]
        return result


def reference_training(ranks: int, rank: int, start_step: int, steps: int, lr: float = 0.3) -> Tensor:
    model = layers()
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    compressors = {
        name: Reference(name, rank, parameter.shape[1])
        for name, parameter in zip(names, parameters, strict=True)
        if parameter.ndim == 2
    }
    for step in range(steps):
        every = [local_gradients(model, batch(r, step)) for r in range(ranks)]
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            gradients = [gradient[index] for gradient in every]
            if name in compressors and step >= start_step:
                mean = compressors[name].mean(gradients)
            else:
                mean = torch.stack(gradients).mean(0)
            with torch.no_grad():
                parameter -= lr * mean
    return parameters_of(model)


def powersgd_training(hook: PowerSGD, steps: int, options: dict[str, Any]) -> Tensor:
    model = layers()
    ddp = in_ddp(model, hook, **options)
    train(ddp, hook, range(steps))
    return parameters_of(model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.1}, {"static_graph": True}]
)
def test_training_is_that_of_the_paper(ranks: int, options: dict[str, Any]) -> None:
    """With many buckets: with two and more, torch's PowerSGD deadlocks on gloo."""
    several = run_ranks(powersgd_training, ranks, PowerSGD(rank=4, start_step=3), 30, options)
    for parameters in several:
        assert torch.equal(parameters, several[0]), "the ranks differ in some bit"
    torch.testing.assert_close(several[0], reference_training(ranks, 4, 3, 30), rtol=0, atol=1e-10)
    exact = reference_training(ranks, 4, 30, 30)
    assert (several[0] - exact).abs().max() > 1e-4, "nothing was compressed"


def sums_over_time(hook: PowerSGD) -> tuple[Tensor, Tensor, Tensor]:
    """Of the weight's gradient over 20 backwards: what came out, the exact means, and this rank's last error."""
    model = layers(count=2)
    ddp = in_ddp(model, hook)
    total, exact = torch.zeros(64, 64, dtype=torch.float64), torch.zeros(64, 64, dtype=torch.float64)
    for step in range(20):
        model.zero_grad()
        loss_of(ddp, batch(dist.get_rank(), step)).backward()
        weight = model[2].weight
        assert isinstance(weight, Tensor)
        assert weight.grad is not None
        total += weight.grad
        exact += torch.stack([local_gradients(model, batch(r, step))[2] for r in range(2)]).mean(0)
    return total, exact, hook.errors["2.weight"]


@pytest.mark.parametrize("wire", [Plain(), FP16(), Int8()], ids=lambda wire: type(wire).__name__)
def test_what_is_left_out_is_in_the_errors_and_nowhere_else(wire: Wire) -> None:
    """Over any wire: what it rounds off of P and Q is in the errors, too."""
    (total, exact, first), (_, _, second) = run_ranks(sums_over_time, 2, PowerSGD(rank=2, start_step=0, wire=wire))
    torch.testing.assert_close(total + (first + second) / 2, exact, rtol=0, atol=1e-14)
    assert (total - exact).norm() < 0.5 * exact.norm(), "the errors are never sent"
    assert (total - exact).norm() > 0.01 * exact.norm(), "nothing was compressed"


def train_in_pieces(start_step: int, first: int, last: int, saved: list[bytes] | None) -> tuple[bytes, Tensor]:
    """Steps `first` to `last`, in a process of its own; what is saved at the end."""
    model, hook = layers(), PowerSGD(rank=2, start_step=start_step)
    ddp = in_ddp(model, hook)
    if saved is not None:
        state = torch.load(io.BytesIO(saved[dist.get_rank()]), weights_only=True)
        model.load_state_dict(state["model"])
        hook.load_state_dict(state["hook"])
    train(ddp, hook, range(first, last))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "hook": hook.state_dict()}, buffer)
    return buffer.getvalue(), parameters_of(model)


@pytest.mark.parametrize("start_step", [2, 9])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(start_step: int) -> None:
    """The new process has one bucket in its first step, where the old one had many: state is kept by name."""
    whole = [parameters for _, parameters in run_ranks(train_in_pieces, 2, start_step, 0, 14, None)]
    saved = [state for state, _ in run_ranks(train_in_pieces, 2, start_step, 0, 7, None)]
    resumed = [parameters for _, parameters in run_ranks(train_in_pieces, 2, start_step, 7, 14, saved)]
    assert torch.equal(resumed[0], whole[0])
    assert torch.equal(resumed[1], whole[1])
    without = [state for state, _ in run_ranks(train_in_pieces, 2, start_step, 0, 7, None)]
    for index, state in enumerate(without):
        loaded = torch.load(io.BytesIO(state), weights_only=True)
        loaded["hook"]["errors"] = {}
        buffer = io.BytesIO()
        torch.save(loaded, buffer)
        without[index] = buffer.getvalue()
    if start_step == 2:
        forgetful = run_ranks(train_in_pieces, 2, start_step, 7, 14, without)[0][1]
        assert not torch.equal(forgetful, whole[0]), "the errors make no difference"


class CountingWire(Plain):
    def __init__(self) -> None:
        self.messages: list[int] = []

    def mean(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        self.messages.append(tensor.numel())
        return super().mean(tensor, group)


def messages_of_a_step() -> list[int]:
    wire = CountingWire()
    model = layers(count=3)
    ddp = in_ddp(model, PowerSGD(rank=4, start_step=0, wire=wire), bucket_cap_mb=100)
    for step in range(2):
        wire.messages.clear()
        loss_of(ddp, batch(0, step)).backward()
    return wire.messages


def test_two_messages_for_each_bucket() -> None:
    """3 weights of 64×64 as two factors of 64×4, and 3 biases of 64."""
    assert run_ranks(messages_of_a_step, 2) == [[3 * 64 * 4 + 3 * 64, 3 * 64 * 4]] * 2


def test_only_what_gets_smaller_is_compressed() -> None:
    hook = PowerSGD(rank=4)
    assert hook.compresses(torch.zeros(64, 64))
    assert hook.compresses(torch.zeros(64, 8, 3, 3))
    for shape in [(), (64,), (8, 8), (1, 1000), (0, 64), (64, 0), (4, 64)]:
        assert not hook.compresses(torch.zeros(shape)), shape
    assert not hook.compresses(torch.zeros(64, 64, dtype=torch.complex64))


class Convolutions(nn.Module):
    """Weights of four dimensions, in channels-last memory, and one that has no gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()).double()
        self.unused = nn.Linear(32, 32).double()
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def train_convolutions() -> tuple[list[float], Tensor]:
    model = Convolutions()
    ddp = in_ddp(model, PowerSGD(rank=2, start_step=1), find_unused_parameters=True)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    losses: list[float] = []
    for _ in range(20):
        model.zero_grad()
        loss = ddp(x)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.net.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
    return losses, parameters_of(model)


def test_convolutions_and_unused_parameters() -> None:
    (first, mine), (second, theirs) = run_ranks(train_convolutions, 2)
    assert torch.equal(mine, theirs)
    assert first[-1] < 0.9 * first[0]
    assert second[-1] < 0.9 * second[0]


def gradients_around_an_inf() -> tuple[bool, bool, Tensor, bool]:
    """One rank has an inf in one step: were those gradients finite, those after, and what they are."""
    model, hook = layers(), PowerSGD(rank=4, start_step=0)
    ddp = in_ddp(model, hook)
    found: list[Tensor] = []
    for step in range(6):
        model.zero_grad()
        x = batch(dist.get_rank(), step)
        if step == 3 and dist.get_rank() == 1:
            x[0, 0] = torch.inf
        loss_of(ddp, x).backward()
        found.append(flat_gradients(model))
    errors_finite = all(error.isfinite().all() for error in hook.errors.values())
    finite_before = all(gradients.isfinite().all() for gradients in found[:3])
    finite_after = all(gradients.isfinite().all() for gradients in found[4:])
    return bool(found[3].isfinite().all()), bool(finite_before and finite_after), found[-1], bool(errors_finite)


def test_an_inf_is_seen_and_forgotten() -> None:
    (finite, others, first, errors), (finite_1, others_1, second, errors_1) = run_ranks(gradients_around_an_inf, 2)
    assert (finite, finite_1) == (False, False)
    assert (others, others_1, errors, errors_1) == (True, True, True, True)
    assert torch.equal(first, second)


def late_parameter() -> None:
    model, hook = layers(count=1), PowerSGD(rank=1, start_step=0)
    ddp = in_ddp(model, hook)
    hook.context.names.clear()  # pyright: ignore[reportAttributeAccessIssue]
    loss_of(ddp, batch(0, 0)).backward()


def test_a_parameter_without_a_name_is_an_error() -> None:
    for error in errors_of_ranks(late_parameter, 2):
        assert "whose name it was not told" in error


def test_another_rank_keeps_the_errors_and_draws_new_factors() -> None:
    def one_process(hook: PowerSGD) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            train(in_ddp(layers(count=1), hook), hook, range(3))
        finally:
            hook.teardown()
            dist.destroy_process_group()

    hook = PowerSGD(rank=4, start_step=0)
    one_process(hook)
    assert hook.factors["0.weight"].shape == (64, 4)
    assert hook.errors["0.weight"].shape == (64, 64)
    hook.rank = 2
    one_process(hook)
    assert hook.factors["0.weight"].shape == (64, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bases_are_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(rows, rank, dtype=dtype) for rows in (5, 64, 300) for rank in (1, 2, 4) for _ in range(5)]
    matrices.append(torch.zeros(64, 4, dtype=dtype))
    matrices.append(torch.ones(64, 4, dtype=dtype))
    for matrix, basis in zip(matrices, orthogonal(matrices), strict=True):
        assert torch.equal(basis, orthogonal([matrix])[0])
        torch.testing.assert_close(basis.T @ basis, torch.eye(matrix.shape[1], dtype=dtype), rtol=0, atol=1e-5)
        torch.testing.assert_close(basis @ (basis.T @ matrix), matrix, rtol=0, atol=1e-4)
