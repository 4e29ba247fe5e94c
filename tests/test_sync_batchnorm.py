"""BatchNorm over all ranks is BatchNorm on the concatenated batch: forward, backward, and what it keeps."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from run_ranks import errors_of_ranks, run_ranks
from samestep.strategies.activation_checkpointing import checkpoint_activations
from samestep.strategies.sync_batchnorm import TorchSyncBatchNorm, convert, revert
from samestep.strategies.union_batchnorm import Normalize, Ranks, UnionBatchNorm, union_statistics
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CHANNELS = 3
KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
NO_GROUP: Any = object()  # conversion does not ask it anything


class Counted:
    """Counts collectives by name."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        self.names[name] += 1
        return nullcontext()


@cache
def own_group() -> dist.ProcessGroup:
    """A group of all ranks for BatchNorm alone, made once in a process."""
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))


def converted(module: nn.Module, named: Any = nullcontext) -> nn.Module:
    return convert(module, own_group(), "cpu", named)


def close(actual: Tensor, expected: Tensor, what: str = "", atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


# --- equal to BatchNorm on the concatenated batch ----------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.0},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "eps": 0.1},
    *([{"bias": False}] if "bias" in inspect.signature(nn.BatchNorm1d).parameters else []),
]
LAYOUTS = ["contiguous", "channels last", "transposed", "every second"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "channels last" and x.dim() > 3:
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x


def layer_for(shape: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    layer = KINDS[len(shape)](CHANNELS, **options).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(CHANNELS, generator=generator, dtype=torch.float64))
    return layer


def train(layer: nn.Module, rows: slice, size: int, shape: tuple[int, ...], layout: str) -> dict[str, Tensor]:
    """Two batches, of which this rank has `rows` each; the loss is a weighted sum, so that every value counts."""
    generator = torch.Generator().manual_seed(size + len(shape))
    found: dict[str, Tensor] = {}
    for batch in range(2):
        x, weights = torch.randn(2, size, CHANNELS, *shape, generator=generator, dtype=torch.float64)
        x = laid_out((x * torch.tensor([1.0, 5.0, 0.2]).view(-1, *[1] * len(shape)) + 4)[rows], layout)
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * weights[rows]).sum().backward()
        assert x.grad is not None
        found |= {f"output {batch}": y.detach(), f"input gradient {batch}": x.grad}
    return {
        **found,
        **{f"gradient of {name}": cast(Tensor, parameter.grad) for name, parameter in layer.named_parameters()},
        **dict(layer.named_buffers()),
    }


SHAPES: list[tuple[int, ...]] = [(), (5,), (4, 3), (2, 3, 2)]  # (N, C), (N, C, L), (N, C, H, W), (N, C, D, H, W)
CASES = list(product(SHAPES, OPTIONS, LAYOUTS))


def train_share(sizes: list[int]) -> list[dict[str, Tensor]]:
    start = sum(sizes[: dist.get_rank()])
    rows = slice(start, start + sizes[dist.get_rank()])
    return [
        train(converted(layer_for(shape, options)), rows, sum(sizes), shape, layout) for shape, options, layout in CASES
    ]


@pytest.mark.parametrize("sizes", [[6], [4, 4], [1, 5], [0, 7], [1, 1], [3, 0, 2], [2, 5, 1]], ids=str)
def test_it_equals_batchnorm_on_the_concatenated_batch(sizes: list[int]) -> None:
    """For every shape, option and memory layout; `sizes` are the ranks' batches."""
    ranks = run_ranks(train_share, len(sizes), sizes)
    for (shape, options, layout), *found in zip(CASES, *ranks, strict=True):
        expected = train(layer_for(shape, options), slice(None), sum(sizes), shape, layout)
        assert all(rank.keys() == expected.keys() for rank in found)
        for name, value in expected.items():
            what = f"{shape}, {options}, {layout}: {name}"
            if name.startswith(("output", "input gradient")):
                close(torch.cat([rank[name] for rank in found]), value, what)
            elif name.startswith("gradient"):
                close(torch.stack([rank[name] for rank in found]).sum(0), value, what)
            else:
                close(found[0][name], value, what)
                assert all(torch.equal(rank[name], found[0][name]) for rank in found), f"{what}: the ranks differ"


def gradcheck_alone(shape: tuple[int, ...]) -> bool:
    ranks = Ranks(own_group(), "norm", nullcontext)

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cast(Tensor, Normalize.apply(x, weight, bias, union_statistics(x.detach(), ranks), 1e-5, ranks))

    inputs = [
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(4, CHANNELS, *shape), (3,), (3,)]
    ]
    return torch.autograd.gradcheck(normalize, inputs)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_the_gradient_is_the_derivative(shape: tuple[int, ...]) -> None:
    """By differences, which knows nothing of formulas; with one rank, whose statistics go the long way all the same."""
    assert run_ranks(gradcheck_alone, 1, shape) == [True]


def two_forwards_one_backward(rows: slice, more_rows: slice) -> dict[str, Tensor]:
    layer = layer_for((), {})
    if dist.is_initialized():
        converted(layer)
    x = torch.randn(8, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    (layer(x[rows]).pow(3).sum() + layer(x[more_rows]).exp().sum()).backward()
    return {name: cast(Tensor, tensor.grad) for name, tensor in [("input", x), *layer.named_parameters()]}


def two_forwards_on_a_share() -> dict[str, Tensor]:
    start = 2 * dist.get_rank()
    return two_forwards_one_backward(slice(start, start + 2), slice(4 + start, 6 + start))


def test_two_forwards_before_one_backward() -> None:
    first, second = run_ranks(two_forwards_on_a_share, 2)
    for name, gradient in two_forwards_one_backward(slice(4), slice(4, 8)).items():
        close(first[name] + second[name], gradient, name)


# --- precision ---------------------------------------------------------------------------------------------------------


def around_100() -> Tensor:
    return torch.randn(2, 4000, 1, 1, generator=torch.Generator().manual_seed(0)) + 100


def in_half_precision(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4,000 values around 100 on each rank: their sum is beyond float16, their variance below bfloat16's steps."""
    model = converted(nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.BatchNorm1d(1)))
    nn.init.ones_(model[0].weight)
    x = around_100()[dist.get_rank()].requires_grad_()
    with torch.autocast("cpu", dtype):
        y = model(x)
    y.float().pow(3).sum().backward()
    assert y.dtype == dtype
    return y.detach(), cast(Tensor, x.grad), model[1].running_mean, model[1].running_var


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_in_float32_under_autocast(dtype: torch.dtype) -> None:
    ranks = run_ranks(in_half_precision, 2, dtype)
    x = around_100().view(-1, 1, 1).to(dtype).requires_grad_()
    layer = nn.BatchNorm1d(1)
    y = layer(x.float()).to(dtype)
    y.float().pow(3).sum().backward()
    close(torch.cat([rank[0] for rank in ranks]).float(), y.detach().float(), "output", atol=0.02)
    close(torch.cat([rank[1] for rank in ranks]).float(), cast(Tensor, x.grad).float(), "gradient", atol=0.2)
    for _, _, mean, variance in ranks:
        torch.testing.assert_close(mean, layer.running_mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(variance, layer.running_var, rtol=1e-4, atol=0)


def weights_in_bfloat16() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    layer = converted(nn.BatchNorm1d(2).to(torch.bfloat16))
    y = layer(torch.randn(4, 2, dtype=torch.bfloat16))
    y.sum().backward()
    return y.dtype, cast(Tensor, layer.weight.grad).dtype, cast(Tensor, layer.running_var).dtype


def test_a_layer_that_is_itself_in_half_precision() -> None:
    assert run_ranks(weights_in_bfloat16, 2) == [(torch.bfloat16,) * 3] * 2


def far_from_zero() -> Tensor:
    layer = converted(nn.BatchNorm1d(1, momentum=1.0))
    x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(1)) + 10_000
    layer(x[dist.get_rank() :: 2] + dist.get_rank())
    return cast(Tensor, layer.running_var)


def test_the_variance_survives_a_mean_far_from_zero() -> None:
    """In float32 a mean of squares minus the squared mean, 10⁸ both, would leave nothing of a variance of 1."""
    x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(1)) + 10_000
    expected = torch.cat([x[::2], x[1::2] + 1]).double().var(0)
    for variance in run_ranks(far_from_zero, 2):
        torch.testing.assert_close(variance.double(), expected, rtol=1e-3, atol=0)


def formats() -> list[bool]:
    layer = converted(nn.BatchNorm2d(CHANNELS))
    x = torch.randn(2, CHANNELS, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.pow(2).sum().backward()
    return [t.is_contiguous(memory_format=torch.channels_last) for t in (y, cast(Tensor, x.grad))]


def test_channels_last_stays_channels_last() -> None:
    assert run_ranks(formats, 2) == [[True, True]] * 2


# --- collectives -------------------------------------------------------------------------------------------------------


def collectives() -> dict[str, dict[str, int]]:
    def names(layer: nn.Module, counted: Counted, x: Tensor) -> dict[str, int]:
        counted.names.clear()
        y = layer(x)
        if y.requires_grad:
            y.sum().backward()
        return dict(counted.names)

    counted = Counted()
    model = converted(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), counted)
    untracked = converted(nn.BatchNorm1d(2, track_running_stats=False), counted)
    first = converted(nn.BatchNorm1d(2), counted)
    groups = [dist.new_group([rank], backend="gloo") for rank in range(2)]
    recomputed = converted(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), counted)
    checkpoint_activations(recomputed, nn.Sequential)
    alone = convert(nn.BatchNorm1d(2), cast(Any, groups[dist.get_rank()]), "cpu", counted)
    x = torch.randn(3, 2)
    found = {"training": names(model, counted, x), "no input gradient": names(first, counted, x)}
    found["recomputed"] = names(recomputed, counted, x)
    with torch.no_grad():
        found["training without gradients"] = names(model, counted, x)
    for module in (model, untracked):
        module.eval()
    rows = 3 if dist.get_rank() == 0 else 0  # one rank may evaluate what another does not have
    for _ in range(1 + dist.get_rank()):
        found["evaluation"] = names(model, counted, x[:rows])
        found["evaluation without statistics"] = names(untracked, counted, x)
    found["a group of one"] = names(alone, counted, x)
    return found


def test_two_collectives_a_step_and_none_in_evaluation() -> None:
    statistics, gradients = "batchnorm statistics of ", "batchnorm gradients of "
    for rank in run_ranks(collectives, 2):
        assert rank == {
            "training": {f"{statistics}1": 1, f"{gradients}1": 1},
            "no input gradient": {f"{statistics}BatchNorm1d": 1},
            "training without gradients": {f"{statistics}1": 1},
            "recomputed": {f"{statistics}0.1": 2, f"{gradients}0.1": 1},
            "evaluation": {},
            "evaluation without statistics": {},
            "a group of one": {},
        }


def one_value_in_all() -> None:
    converted(nn.BatchNorm1d(2)).train()(torch.randn(1 - dist.get_rank(), 2))


def test_one_value_per_channel_in_all_batches_is_an_error_on_every_rank() -> None:
    for error in errors_of_ranks(one_value_in_all, 2):
        assert error.startswith("ValueError: BatchNorm1d: expected more than 1 value per channel when training")


def no_value_at_all() -> tuple[list[int], list[Tensor]]:
    layer = converted(nn.BatchNorm2d(2))
    x = torch.randn(0, 2, 3, 3, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(cast(Tensor, layer.weight.grad), torch.zeros(2))
    return list(y.shape), list(layer.buffers())


def test_an_empty_union_changes_no_statistics() -> None:
    reference = nn.BatchNorm2d(2)
    reference(torch.randn(0, 2, 3, 3))
    for shape, buffers in run_ranks(no_value_at_all, 2):
        assert shape == [0, 2, 3, 3]
        assert all(torch.equal(ours, torchs) for ours, torchs in zip(buffers, reference.buffers(), strict=True))


def wrong_shape(shape: list[int]) -> None:
    converted(nn.Sequential(nn.BatchNorm2d(2)))(torch.randn(shape))


@pytest.mark.parametrize(
    ("shape", "message"),
    [([4, 3, 2, 2], "ValueError: 0: expected 2 channels, received 3 in an input of shape [4, 3, 2, 2]"),
     ([4, 2], "ValueError: expected 4D input (got 2D input)")],
)  # fmt: skip
def test_a_wrong_shape_is_refused_before_peers_wait(shape: list[int], message: str) -> None:
    for error in errors_of_ranks(wrong_shape, 2, shape):
        assert error.startswith(message)


def second_derivative() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(converted(nn.BatchNorm1d(2))(x).pow(2).sum(), x, create_graph=True)
    gradient.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    for error in errors_of_ranks(second_derivative, 2):
        assert "once_differentiable" in error


# --- training with DDP -------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 6, bias=False),
        nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 1),
    ).double()  # fmt: skip


def data(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 2, 5, generator=generator, dtype=torch.float64) * 2 + 1
    return x, x.sum((1, 2)).sin().unsqueeze(1)


def train_steps(window: int, checkpointing: bool, samples: int) -> dict[str, Tensor]:
    """20 steps of SGD; with several ranks by plain DDP, whose broadcast of buffers is off: they must stay equal anyway."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)  # before the conversion
    if checkpointing:
        model = nn.Sequential(model)
        checkpoint_activations(model, nn.Sequential)
    rank, ranks, call = 0, 1, cast(Any, model)
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        knows = inspect.signature(DistributedDataParallel).parameters
        off = "forward_sync_buffers" if "forward_sync_buffers" in knows else "broadcast_buffers"
        call = DistributedDataParallel(converted(model), **{off: False})
    for step in range(20):
        optimizer.zero_grad()
        for micro_batch in range(window):
            x, y = data(step * window + micro_batch, samples)
            share = slice(rank * samples // ranks, (rank + 1) * samples // ranks)
            with call.no_sync() if ranks > 1 and micro_batch < window - 1 else nullcontext():
                nn.functional.mse_loss(call(x[share]), y[share]).div(window).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(("window", "checkpointing"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_on_shares_equals_one_rank_on_all(ranks: int, window: int, checkpointing: bool) -> None:
    """Also with activations computed again in backward: the ranks meet once more there, statistics move once."""
    several = run_ranks(train_steps, ranks, window, checkpointing, 4 * ranks)
    one = train_steps(window, False, 4 * ranks)
    assert one["1.num_batches_tracked"] == 20 * window
    for rank in several:
        for name, value in one.items():
            found = rank[("0." if checkpointing else "") + name]
            close(found, value, name)
            assert torch.equal(found, several[0][("0." if checkpointing else "") + name]), f"{name}: the ranks differ"


def compiled() -> list[Tensor]:
    rank = dist.get_rank()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = nn.Sequential(layer_for((), {}), nn.Tanh())
    converted(layer)
    torch.compile(layer, backend="eager")(x[rank * 2 : rank * 2 + 2]).sum().backward()
    return [cast(Tensor, layer[0].weight.grad), cast(Tensor, layer[0].running_mean)]


def test_inside_a_compiled_model() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = layer_for((), {})
    layer(x).tanh().sum().backward()
    first, second = run_ranks(compiled, 2)
    close(first[0] + second[0], cast(Tensor, layer.weight.grad), "gradient")
    for rank in (first, second):
        close(rank[1], cast(Tensor, layer.running_mean), "mean")


# --- conversion --------------------------------------------------------------------------------------------------------


class Plain(nn.BatchNorm2d):
    """A subclass that adds no forward."""


class Scaled(nn.BatchNorm1d):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Holder(nn.Module):
    """BatchNorm in every place: nested, shared, in a list that nn.Module does not know, frozen, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), nn.BatchNorm3d(2)])
        self.shared = self.blocks[0][1]
        self.named = nn.ModuleDict({"plain": Plain(2), "frozen": nn.BatchNorm1d(2).requires_grad_(False).eval()})
        self.others = nn.Sequential(nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), nn.LayerNorm(2))
        self.unregistered = [self.named["plain"]]


def remembered(module: nn.Module) -> dict[str, Any]:
    """What must not change: every tensor and hook as an object, keys, flags, and where each layer is used."""
    return {
        "keys": list(module.state_dict()),
        "tensors": {name: id(t) for name, t in [*module.named_parameters(), *module.named_buffers()]},
        "flags": {name: m.training for name, m in module.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in module.named_parameters()},
        "modules": {name: id(m) for name, m in module.named_modules(remove_duplicate=False)},
        "hooks": {(n, k): dict(h) for n, m in module.named_modules() for k, h in vars(m).items() if "hooks" in k},
        "attributes": {name: sorted(vars(m)) for name, m in module.named_modules()},
    }


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_conversion_changes_nothing_but_the_computation(device_type: str) -> None:
    module = Holder()
    calls: list[str] = []
    handles = [
        module.shared.register_forward_hook(lambda *_: calls.append("forward")),
        module.shared.register_forward_pre_hook(lambda *_: calls.append("forward_pre")),
        module.shared.register_full_backward_hook(lambda *_: calls.append("backward")),
        module.shared.register_state_dict_post_hook(lambda *_: calls.append("state_dict")),
        module.shared.register_load_state_dict_post_hook(lambda *_: calls.append("load_state_dict")),
    ]
    before, classes = remembered(module), {name: type(m) for name, m in module.named_modules()}
    expected = UnionBatchNorm if device_type == "cpu" else TorchSyncBatchNorm
    for _ in range(2):
        assert convert(module, NO_GROUP, device_type) is module
        assert convert(module, NO_GROUP, device_type) is module  # as when the model is wrapped anew
        layers = {name for name, m in module.named_modules() if isinstance(m, expected)}
        assert layers == {"blocks.0.1", "blocks.1", "named.plain", "named.frozen"}
        assert module.unregistered[0] is module.named["plain"]
        assert isinstance(module.named["plain"], Plain)
        after = remembered(module)
        for name in layers:
            added = set(after["attributes"][name]) - set(before["attributes"][name])
            assert added == {"ranks" if device_type == "cpu" else "process_group"}
        assert {**after, "attributes": 0} == {**before, "attributes": 0}
        assert revert(module) is module
        assert remembered(module) == before
        assert {name: type(m) for name, m in module.named_modules()} == classes
    convert(module, NO_GROUP, device_type)
    calls.clear()
    module.eval()
    module.shared(torch.randn(2, 2, 3, 3, requires_grad=True)).sum().backward()
    module.load_state_dict(module.state_dict())
    assert {"forward", "forward_pre", "backward", "state_dict", "load_state_dict"} == set(calls)
    for handle in handles:
        handle.remove()
    calls.clear()
    module.shared(torch.randn(2, 2, 3, 3))
    assert not calls


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_root_that_is_a_batchnorm_stays_the_same_object(device_type: str) -> None:
    root = nn.BatchNorm1d(2)
    assert convert(root, NO_GROUP, device_type) is root
    assert type(root).__name__ == {"cpu": "UnionBatchNorm1d", "cuda": "SyncBatchNorm1d"}[device_type]
    assert revert(root) is root
    assert type(root) is nn.BatchNorm1d


def recomputed_alone() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(2))
    checkpoint_activations(module, nn.BatchNorm1d)
    return module[0]


@pytest.mark.parametrize(
    ("layer", "device_type", "message"),
    [
        (Scaled(2), "cpu", r"1\.0: expected .* received a Scaled with a `forward` of its own"),
        (Scaled(2), "cuda", r"1\.0: expected .* received a Scaled with a `forward` of its own"),
        (recomputed_alone(), "cpu", r"1\.0: .* received a RecomputedBatchNorm1d. .* select the block around it"),
        (nn.LazyBatchNorm2d(), "cpu", r"1\.0: .* received a LazyBatchNorm2d that has seen no batch yet"),
        (nn.LazyBatchNorm2d(), "cuda", r"1\.0: .* received a LazyBatchNorm2d that has seen no batch yet"),
        (nn.SyncBatchNorm(2), "cpu", r"1\.0: .* received torch's SyncBatchNorm, which trains on CUDA only"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(layer: nn.Module, device_type: str, message: str) -> None:
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(layer))
    with pytest.raises(ValueError, match=message):
        convert(module, NO_GROUP, device_type)
    assert type(module[0]) is nn.BatchNorm2d, "converted in spite of the error"


def test_a_forward_set_on_the_object_is_refused() -> None:
    layer = nn.BatchNorm1d(2)
    layer.forward = lambda input: input
    with pytest.raises(ValueError, match="`forward` of its own"):
        convert(layer, NO_GROUP, "cpu")


def test_torch_syncbatchnorm_is_left_alone_on_cuda() -> None:
    layer = nn.SyncBatchNorm(2)
    assert type(convert(nn.Sequential(layer), NO_GROUP, "cuda")[0]) is nn.SyncBatchNorm  # pyright: ignore


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_copy_meets_the_same_ranks_and_a_pickle_is_an_ordinary_batchnorm(device_type: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    convert(module, NO_GROUP, device_type)
    attribute = "ranks" if device_type == "cpu" else "process_group"
    twin = copy.deepcopy(module)
    assert type(twin[1]) is type(module[1])
    assert getattr(twin[1], attribute) is getattr(module[1], attribute)
    assert twin[1].weight is not module[1].weight
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(module, protocol))
        assert type(loaded[1]) is nn.BatchNorm1d
        assert not hasattr(loaded[1], attribute)
        assert all(
            torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True)
        )
