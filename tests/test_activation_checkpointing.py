"""Activations that are computed again in backward: the same gradients, names and statistics, also under DDP."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from run_ranks import run_ranks
from samestep.strategies.activation_checkpointing import checkpoint_activations, find_reentrant_checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """What is recomputed: dropout and BatchNorm inside, a keyword argument, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4))
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.net(x)


class Network(nn.Module):
    """Two blocks, the first used twice, and a head that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.again = self.first
        self.head, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.second(self.first(x, scale=0.5))))


def network() -> Network:
    torch.manual_seed(2)
    return Network().double()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        if value is None or other is None:
            assert value is other, name
        else:
            assert torch.equal(value, other), name


# --- one process -------------------------------------------------------------------------------------------------------


def step(model: nn.Module, backwards: int = 1) -> Tensor:
    torch.manual_seed(7)
    output = model(torch.randn(5, 6, dtype=torch.float64))
    for left in reversed(range(backwards)):
        output.sum().backward(retain_graph=left > 0)
    return output.detach()


@pytest.mark.parametrize(
    "kinds",
    [Block, (Block, nn.Linear), nn.Sequential, lambda m: isinstance(m, nn.Dropout)],
    ids=["a class", "two classes", "a container", "a function"],
)
@pytest.mark.parametrize("backwards", [1, 2])
def test_everything_is_the_same_bit_by_bit(kinds: Any, backwards: int) -> None:
    plain, recomputed = network(), network()
    before = {id(m): name for name, m in recomputed.named_modules()}
    checkpoint_activations(recomputed, kinds)
    assert {id(m): name for name, m in recomputed.named_modules()} == before
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    for _ in range(3):
        assert torch.equal(step(plain, backwards), step(recomputed, backwards))
        same(gradients(plain), gradients(recomputed))
        same(dict(plain.named_buffers()), dict(recomputed.named_buffers()))  # statistics have moved once
    assert plain.first.net[1].num_batches_tracked == 6
    recomputed.load_state_dict(plain.state_dict())


def test_the_forward_runs_again_in_backward_and_not_without_gradients() -> None:
    model = network()
    assert checkpoint_activations(model, Block) == 2  # a block used in two places counts once
    step(model)
    assert (model.first.calls, model.second.calls) == (4, 2)
    with torch.no_grad():
        model(torch.randn(5, 6, dtype=torch.float64))
    assert (model.first.calls, model.second.calls) == (6, 3)


def saved_bytes(model: nn.Module) -> int:
    """What the graph of one forward keeps, each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(64, 6, dtype=torch.float64))
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


def test_in_a_compiled_model() -> None:
    """In one graph, by a backend that differentiates as the default one does, but needs no compiler."""
    plain, recomputed = network(), network()
    checkpoint_activations(recomputed, nn.Sequential)
    compiled = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    for model, call in ((plain, plain), (recomputed, compiled)):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for _ in range(2):
            call(torch.ones(5, 6, dtype=torch.float64).cumsum(0).sin()).sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(recomputed)[name], gradient, rtol=0, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(recomputed.named_buffers())[name], buffer, rtol=0, atol=1e-12)


def test_activations_are_not_kept() -> None:
    plain, recomputed = network(), network()
    checkpoint_activations(recomputed, Block)
    assert saved_bytes(recomputed) < saved_bytes(plain) / 3


def test_a_module_inside_a_selected_one_is_not_selected_again() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert checkpoint_activations(model, (nn.Sequential, nn.Linear)) == 2
    assert [type(m).__name__ for m in model.modules()].count("Linear") == 2


def test_hooks_of_a_selected_module_run_once() -> None:
    model, calls = network(), list[str]()
    model.second.register_forward_hook(lambda *_: calls.append("forward"))
    model.second.register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint_activations(model, Block)
    step(model)
    assert calls == ["forward", "backward"]


def test_no_match_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"kinds=\(Conv1d, Conv2d\) to select submodules of Network, received no match"
    ):
        checkpoint_activations(network(), (nn.Conv1d, nn.Conv2d))
    with pytest.raises(ValueError, match="classes: Linear, ReLU"):
        checkpoint_activations(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Sequential)  # itself is no submodule


def test_twice_is_an_error_that_names_the_modules_and_changes_nothing() -> None:
    model = network()
    checkpoint_activations(model, lambda module: module is model.second)
    with pytest.raises(ValueError, match="received second, already recomputed"):
        checkpoint_activations(model, Block)
    assert type(model.first) is Block


def test_a_forward_set_on_the_object_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].forward = lambda x: x
    with pytest.raises(ValueError, match="set on the object for 1 "):
        checkpoint_activations(model, nn.Linear)
    assert type(model[0]) is nn.Linear


def test_a_copy_recomputes_and_a_pickle_is_the_ordinary_module() -> None:
    model = network()
    checkpoint_activations(model, Block)
    assert type(copy.deepcopy(model).first) is type(model.first)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.first) is Block
    assert loaded.again is loaded.first
    assert torch.equal(step(loaded.eval()), step(model.eval()))


def test_a_reentrant_checkpoint_is_found_and_others_are_not() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    assert not find_reentrant_checkpoint(torch.zeros(()))
    assert not find_reentrant_checkpoint(layer(x).sum())
    assert not find_reentrant_checkpoint(cast(Tensor, checkpoint(layer, x, use_reentrant=False)).sum())
    hidden = layer(layer(cast(Tensor, checkpoint(layer, layer(x), use_reentrant=True))))
    assert find_reentrant_checkpoint(hidden.sum() + layer(x).sum())


def test_the_search_visits_each_node_of_a_deep_graph_once() -> None:
    """By paths it would never end (each addition doubles them), by recursion it would overflow."""
    x = torch.ones((), requires_grad=True)
    for _ in range(5000):
        x = x + x
    assert not find_reentrant_checkpoint(x)


# --- several ranks -----------------------------------------------------------------------------------------------------


def train(recompute: bool, find_unused: bool, window: int) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    """Three steps by DDP, of several micro-batches each; each rank has its own samples and dropout."""
    model = network()
    if not find_unused:
        model.unused.requires_grad_(False)
    if recompute:
        checkpoint_activations(model, Block)
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    torch.manual_seed(10 + dist.get_rank())
    steps: list[dict[str, Tensor | None]] = []
    for _ in range(3):
        model.zero_grad()
        for micro_batch in range(window):
            with nullcontext() if micro_batch == window - 1 else ddp.no_sync():
                ddp(torch.randn(4, 6, dtype=torch.float64)).pow(2).mean().backward()
        steps.append({name: None if g is None else g.clone() for name, g in gradients(model).items()})
    return steps, dict(model.named_buffers())


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_under_ddp_with_accumulation_and_unused_parameters(find_unused: bool, window: int) -> None:
    plain = run_ranks(train, 2, False, find_unused, window)
    recomputed = run_ranks(train, 2, True, find_unused, window)
    for rank in range(2):
        for (ours, theirs), all_ranks in zip(
            zip(recomputed[rank][0], plain[rank][0], strict=True), plain[0][0], strict=True
        ):
            same(ours, theirs)
            same(ours, all_ranks)
        same(dict(recomputed[rank][1]), dict(plain[rank][1]))


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant:
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)
        return self.layer(self.layer(x))


def gradient_of_a_layer_used_twice(how: str) -> tuple[Tensor, Tensor, bool]:
    """The gradient that DDP leaves, the mean of the ranks' own gradients, and whether the cause was found."""
    torch.manual_seed(0)
    model = Twice(how == "reentrant").double()
    reference = copy.deepcopy(model.layer)
    if how == "ours":
        checkpoint_activations(model, nn.Linear)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    reference(reference(x)).pow(2).sum().backward()
    mean = cast(Tensor, reference.weight.grad)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    ddp = DistributedDataParallel(model)  # kept: without it, its hooks would go, and nothing be reduced
    loss = ddp(x.requires_grad_()).pow(2).sum()
    loss.backward()
    return cast(Tensor, model.layer.weight.grad), mean, find_reentrant_checkpoint(loss)


def test_reentrant_checkpoints_of_one_layer_part_the_ranks_without_an_error() -> None:
    """The trap itself, which is torch's: should it ever be gone, this test says that the refusal may go, too."""
    (first, mean, found), (second, _, found_too) = run_ranks(gradient_of_a_layer_used_twice, 2, "reentrant")
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, mean)
    assert (found, found_too) == (True, True)


@pytest.mark.parametrize("how", ["plain", "ours"])
def test_a_layer_recomputed_twice_has_the_mean_gradient_on_all_ranks(how: str) -> None:
    (first, mean, found), (second, _, found_too) = run_ranks(gradient_of_a_layer_used_twice, 2, how)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, mean, rtol=0, atol=1e-12)
    assert (found, found_too) == (False, False)
