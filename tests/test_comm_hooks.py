"""Communication hooks in torch's DDP: every hook against the mean of the ranks' own gradients."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooked import batch, flat_gradients, in_ddp, layers, local_gradients, loss_of, prepare
from run_ranks import RankError, errors_of_ranks, run_ranks
from samestep.strategies.comm_hooks import (
    FP16,
    NAMES,
    Bucket,
    CommHook,
    Compressed,
    FunctionHook,
    OrderedHook,
    PostLocalSGD,
    PowerSGD,
    register,
    resolve,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

# Relative to the largest gradient of a rank. Values are encoded twice on their way.
BOUNDS = {
    "fp16": 2 * 2**-11,
    "bf16": 2 * 2**-8,
    "quantize8": 2 / 254,
    "powersgd": 1e-12,  # its first steps are the plain mean
    "post_local_sgd": 1e-12,
    "hierarchical": 1e-12,
}
SMALLEST = {torch.float32: 1e-6, torch.float64: 0.0}


def gradients_and_errors(name: str) -> list[tuple[Tensor, float]]:
    """For each type and kind of bucket: the gradients, and their largest error relative to a rank's largest gradient.

    The first backward has other buckets than the second, and the third accumulates two micro-batches.
    """
    outcomes: list[tuple[Tensor, float]] = []
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.float64):
        for as_view in (False, True):
            model = layers(dtype)
            hook = resolve(name)
            assert hook is not None
            ddp = in_ddp(model, hook, gradient_as_bucket_view=as_view)
            for steps in ([0], [1], [2, 3]):
                model.zero_grad()
                *local, last = steps
                for step in local:
                    with ddp.no_sync():
                        loss_of(ddp, batch(rank, step, dtype)).backward()
                loss_of(ddp, batch(rank, last, dtype)).backward()
                own = [
                    sum(torch.cat([g.reshape(-1) for g in local_gradients(model, batch(r, s, dtype))]) for s in steps)
                    for r in range(ranks)
                ]
                everyone = torch.stack([gradient for gradient in own if isinstance(gradient, Tensor)]).double()
                found = flat_gradients(model)
                error = (found.double() - everyone.mean(0)).abs().max() / everyone.abs().max()
                outcomes.append((found, error.item()))
            hook.teardown()
    return outcomes


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_mean_within_the_bound_and_the_same_bits_on_all_ranks(name: str, ranks: int) -> None:
    several = run_ranks(gradients_and_errors, ranks, name)
    for index, (gradients, error) in enumerate(several[0]):
        dtype = gradients.dtype
        assert error <= BOUNDS[name] + SMALLEST[dtype], (index, dtype)
        if BOUNDS[name] > 1e-4:
            assert error > BOUNDS[name] / 100, "this hook does not compress at all"
        for other in several[1:]:
            assert torch.equal(other[index][0], gradients), "the ranks differ in some bit"


def gradients_with(hook: CommHook | None) -> Tensor:
    model = layers()
    ddp = in_ddp(model, hook)
    for step in range(2):
        model.zero_grad()
        loss_of(ddp, batch(dist.get_rank(), step)).backward()
    return flat_gradients(model)


@pytest.mark.parametrize("name", ["powersgd", "post_local_sgd", "hierarchical"])
def test_the_plain_mean_is_that_of_ddp_without_a_hook_to_the_bit(name: str) -> None:
    assert torch.equal(run_ranks(gradients_with, 2, resolve(name))[0], run_ranks(gradients_with, 2, None)[0])


class Waves(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(40, 40, dtype=torch.complex128))
        self.vector = nn.Parameter(torch.randn(7, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.matrix * x).abs().square().sum() + (self.vector * x).abs().sum()


def complex_gradients(hook: CommHook) -> tuple[Tensor, Tensor]:
    model = Waves()
    ddp = in_ddp(model, hook)
    ddp(torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64)).backward()
    parameters = list(model.parameters())
    own = [torch.autograd.grad(model(torch.tensor(1.0 + r, dtype=torch.float64)), parameters) for r in (0, 1)]
    return flat_gradients(model), torch.cat([((a + b) / 2).reshape(-1) for a, b in zip(*own, strict=True)])


@pytest.mark.parametrize("name", NAMES)
def test_complex_gradients(name: str) -> None:
    hook = resolve(name)
    for found, expected in run_ranks(complex_gradients, 2, hook):
        limit = (BOUNDS[name] + 1e-12) * expected.abs().max().item() * 2
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)


def half_gradients(name: str) -> list[tuple[Tensor, Tensor]]:
    outcomes: list[tuple[Tensor, Tensor]] = []
    for dtype in (torch.bfloat16, torch.float16):
        model = layers(dtype, count=2)
        hook = resolve(name)
        if isinstance(hook, PowerSGD):
            hook.start_step = 0
        # With one sample a rank, the mean gradient has a rank of 2: PowerSGD's first step is exact.
        ddp = in_ddp(model, hook)
        loss_of(ddp, batch(dist.get_rank(), 0, dtype, size=1)).backward()
        own = [torch.cat([g.reshape(-1) for g in local_gradients(model, batch(r, 0, dtype, size=1))]) for r in (0, 1)]
        outcomes.append((flat_gradients(model), torch.stack(own).float().mean(0)))
    return outcomes


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_half_precision(name: str) -> None:
    for rank in run_ranks(half_gradients, 2, name):
        for found, expected in rank:
            error = (found.float() - expected).abs().max() / expected.abs().max()
            assert error < 2**-6


# --- a gradient scaler sees what it must, and nothing else ----------------------------------


def scales_after(name: str, gradients: list[float]) -> list[float]:
    """The scaler's scale after a step in which rank r's gradient is gradients[r], and the weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    hook = resolve(name)
    assert hook is not None
    ddp = in_ddp(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(ddp(torch.tensor([[gradients[dist.get_rank()]]])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), model.weight.item()]


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_gradient_does_not_overflow(name: str) -> None:
    """2 · 65536 is inf for torch's fp16 hook, which backs off to a scale of 16384."""
    for scale, weight in run_ranks(scales_after, 2, name, [2.0, 2.0]):
        assert scale == 2.0**16
        assert weight == pytest.approx(-1.0, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_all_ranks_skip_when_one_has_inf_or_nan(name: str, bad: float) -> None:
    assert run_ranks(scales_after, 2, name, [2.0, bad]) == [[2.0**15, 1.0]] * 2


# --- failures ---------------------------------------------------------------------------------


class FailsAtTheThirdBucket(OrderedHook):
    def __init__(self) -> None:
        super().__init__()
        self.buckets = 0

    def mean(self, bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
        self.buckets += 1
        if self.buckets == 3:
            raise ValueError("the third bucket is bad")
        return bucket.flat


def fail_in_the_worker() -> None:
    hook = FailsAtTheThirdBucket()
    model = layers()
    ddp = in_ddp(model, hook)
    for step in range(5):
        try:
            loss_of(ddp, batch(0, step)).backward()
        finally:
            assert hook.buckets <= 3, "it went on after the failure, one collective behind the others"


def test_what_a_hook_raises_comes_out_of_backward() -> None:
    for error in errors_of_ranks(fail_in_the_worker, 2):
        assert "the third bucket is bad" in error


def lose_a_peer(name: str) -> None:
    model = layers()
    ddp = in_ddp(model, resolve(name))
    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            import os

            os._exit(7)
        loss_of(ddp, batch(0, step)).backward()


@pytest.mark.parametrize("name", ["fp16", "powersgd"])
def test_a_dead_peer_ends_the_others(name: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(lose_a_peer, 2, name)
    assert "rank 1: died with exit code 7" in str(caught.value)
    assert "did not finish in time" not in str(caught.value)


def test_a_collective_that_never_ends_does_not_hold_the_process() -> None:
    code = (
        "import threading, torch; from samestep.strategies.comm_hooks.worker import ThreadWorker;"
        "worker = ThreadWorker(); worker.submit(threading.Event().wait); worker.close(); print('closed')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "closed\n"), result.stderr


def test_a_hook_without_setup_says_so() -> None:
    with pytest.raises(RuntimeError, match="call setup"):
        _ = Compressed(FP16()).context


# --- what users may give ------------------------------------------------------------------------


def test_resolve() -> None:
    assert resolve(None) is None
    hook = PowerSGD(rank=2)
    assert resolve(hook) is hook
    assert isinstance(resolve("powersgd"), PowerSGD)
    assert resolve("fp16") is not resolve("fp16")
    assert isinstance(resolve(default_hooks.allreduce_hook), FunctionHook)
    with pytest.raises(ValueError, match=r"expected one of fp16, .*Did you mean 'powersgd'\?"):
        resolve("PowerSDG")
    with pytest.raises(ValueError, match=r"bucket\)\.$"):
        resolve("zzzz")
    with pytest.raises(TypeError, match="comm_hook is the class PowerSGD"):
        resolve(PowerSGD)
    with pytest.raises(TypeError, match="comm_hook is int"):
        resolve(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="only a function"):
        resolve("fp16", state=object())


@pytest.mark.parametrize(
    "make",
    [lambda: PowerSGD(0), lambda: PowerSGD(start_step=-1), lambda: PostLocalSGD(-1), lambda: PostLocalSGD(period=0)],
)
def test_impossible_numbers_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def halved(state: Any, bucket: dist.GradBucket, factor: float = 0.5) -> torch.futures.Future[Tensor]:
    state.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * factor)
    return future


class Halved:
    """A callable object; torch asks for its `__name__`."""

    def __call__(self, state: Any, any_name: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return halved(state, any_name)


def with_function(function: Any) -> tuple[float, int]:
    seen: list[int] = []
    model = layers(count=2)
    ddp = in_ddp(model, resolve(function, seen))
    loss_of(ddp, batch(0, 0)).backward()
    expected = torch.cat([gradient.reshape(-1) for gradient in local_gradients(model, batch(0, 0))])
    return (flat_gradients(model) / expected).nanmean().item(), len(seen)


@pytest.mark.parametrize("function", [halved, functools.partial(halved, factor=0.5), Halved()])
def test_functions_partials_and_objects_are_hooks_with_their_state(function: Any) -> None:
    for ratio, calls in run_ranks(with_function, 2, function):
        assert ratio == pytest.approx(0.5)
        assert calls >= 1


def torch_hook(function: Any) -> Tensor:
    return gradients_with(resolve(function))


def test_torchs_own_hooks_are_hooks() -> None:
    """Its bf16 hook, which it refuses on gloo by name, works."""
    expected = run_ranks(gradients_with, 2, None)[0]
    assert torch.equal(run_ranks(torch_hook, 2, default_hooks.allreduce_hook)[0], expected)
    torch.testing.assert_close(
        run_ranks(torch_hook, 2, default_hooks.bf16_compress_hook)[0], expected, rtol=0, atol=0.01
    )


def returns_a_tensor(_: None, bucket: dist.GradBucket) -> Any:
    return bucket.buffer()


def test_a_tensor_instead_of_a_future_is_explained() -> None:
    for error in errors_of_ranks(torch_hook, 2, returns_a_tensor):
        assert "returned Tensor: expected a torch.futures.Future" in error


def register_twice() -> None:
    model = layers()
    ddp = DistributedDataParallel(model)
    hook = prepare(Compressed(FP16()), model)
    register(ddp, hook)
    register(ddp, hook)


def test_a_second_hook_is_refused() -> None:
    for error in errors_of_ranks(register_twice, 2):
        assert "only be called once" in error


def one_hook_for_two_models() -> bool:
    """A second fit: setup again, with new parameters."""
    hook = PowerSGD(start_step=0)
    first = [gradients_with(hook) for _ in range(2)]
    return torch.equal(*first)


def test_setup_starts_anew() -> None:
    assert run_ranks(one_hook_for_two_models, 2) == [True, True]
