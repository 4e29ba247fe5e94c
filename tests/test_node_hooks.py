"""Hooks that know of nodes: the mean node by node, and post-local SGD against an emulation in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooked import batch, flat_gradients, in_ddp, layers, local_gradients, loss_of, prepare, train
from run_ranks import errors_of_ranks, run_ranks
from samestep.strategies.comm_hooks import FP16, CommHook, Hierarchical, Int8, Plain, PostLocalSGD
from tasks import parameters_of
from torch import Tensor

# --- hierarchical -------------------------------------------------------------------------------


def hierarchical_gradients(hook: Hierarchical, options: dict[str, Any]) -> tuple[Tensor, float]:
    model = layers(count=3)
    ddp = in_ddp(model, hook, **options)
    for step in range(2):
        model.zero_grad()
        loss_of(ddp, batch(dist.get_rank(), step)).backward()
    ranks = range(dist.get_world_size())
    own = torch.stack([torch.cat([g.reshape(-1) for g in local_gradients(model, batch(r, 1))]) for r in ranks])
    found = flat_gradients(model)
    return found, ((found - own.mean(0)).abs().max() / own.abs().max()).item()


@pytest.mark.parametrize(
    ("ranks", "each"), [(4, 2), (4, 1), (4, 4), (2, None), (3, 1)], ids=["2×2", "4×1", "1×4", "1×2", "3×1"]
)
@pytest.mark.parametrize(
    ("wire", "bound"), [(Plain(), 1e-14), (FP16(), 2**-10), (Int8(), 2 / 254)], ids=["plain", "fp16", "int8"]
)
def test_a_mean_node_by_node_is_the_mean(ranks: int, each: int | None, wire: Any, bound: float) -> None:
    hook = Hierarchical(wire, ranks_per_node=each)
    several = run_ranks(hierarchical_gradients, ranks, hook, {"gradient_as_bucket_view": ranks == 4})
    for gradients, error in several:
        assert torch.equal(gradients, several[0][0]), "the ranks differ in some bit"
        assert error <= (bound if each != ranks and each is not None else 1e-14), "the wire is between nodes only"
    if bound > 1e-4 and each in (1, 2):
        assert several[0][1] > bound / 100, "nothing was compressed"


def set_up(hook: CommHook) -> None:
    prepare(hook, layers(count=1))


@pytest.mark.parametrize("hook", [Hierarchical(ranks_per_node=2), PostLocalSGD(ranks_per_node=2)])
def test_nodes_of_unequal_size_are_refused(hook: CommHook) -> None:
    for error in errors_of_ranks(set_up, 3, hook):
        assert "3 ranks in nodes of 2 (ranks_per_node=2): expected nodes of equally many ranks" in error


@pytest.mark.parametrize("each", [0, -1])
def test_nodes_without_ranks_are_refused(each: int) -> None:
    for error in errors_of_ranks(set_up, 2, Hierarchical(ranks_per_node=each)):
        assert "expected nodes of equally many ranks" in error


# --- post-local SGD ---------------------------------------------------------------------------


def emulate(ranks: int, each: int, start_step: int, period: int, steps: int, lr: float = 0.3) -> list[Tensor]:
    """The parameters of every rank, as vectors."""
    models = [layers() for _ in range(ranks)]
    for step in range(steps):
        every = [
            torch.cat([g.reshape(-1) for g in local_gradients(model, batch(r, step))]) for r, model in enumerate(models)
        ]
        vectors: list[Tensor] = []
        for rank, model in enumerate(models):
            first = rank - rank % each
            mine = every if step < start_step else every[first : first + each]
            vectors.append(parameters_of(model) - lr * torch.stack(mine).mean(0))
        if step + 1 > start_step and (step + 1 - start_step) % period == 0:
            vectors = [torch.stack(vectors).mean(0)] * ranks
        for vector, model in zip(vectors, models, strict=True):
            torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())
    return [parameters_of(model) for model in models]


def local_training(hook: PostLocalSGD, first: int, last: int, saved: Any) -> tuple[Tensor, Tensor, Any]:
    """The parameters after the last step, and after a synchronization; and the state to resume from."""
    model = layers()
    ddp = in_ddp(model, hook)
    if saved is not None:
        torch.nn.utils.vector_to_parameters(saved[0].clone(), model.parameters())
        hook.load_state_dict(saved[1])
    train(ddp, hook, range(first, last))
    apart = parameters_of(model)
    hook.synchronize(model.parameters())
    hook.synchronize(iter([]))  # equal already: nothing to do
    return apart, parameters_of(model), hook.state_dict()


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (3, 1), (4, 2), (2, 2)], ids=["2×1", "3×1", "2×2", "1×2"])
@pytest.mark.parametrize("steps", [3, 6, 7, 11])
def test_local_steps_are_those_of_the_emulation(ranks: int, each: int, steps: int) -> None:
    several = run_ranks(local_training, ranks, PostLocalSGD(3, 4, ranks_per_node=each), 0, steps, None)
    expected = emulate(ranks, each, 3, 4, steps)
    mean = torch.stack(expected).mean(0)
    for (apart, together, _), vector in zip(several, expected, strict=True):
        torch.testing.assert_close(apart, vector, rtol=0, atol=1e-12)
        torch.testing.assert_close(together, mean, rtol=0, atol=1e-12)
        assert torch.equal(together, several[0][1]), "the ranks differ in some bit"
    assert torch.equal(several[0][0], several[-1][0]) == (steps != 6 or each == ranks)


def test_a_run_resumed_from_a_synchronized_state_continues() -> None:
    hook = PostLocalSGD(3, 4, ranks_per_node=1)
    _, together, state = run_ranks(local_training, 2, hook, 0, 7, None)[0]
    assert state == {"step": 7}
    resumed = run_ranks(local_training, 2, hook, 7, 14, (together, state))
    whole = run_ranks(local_training, 2, hook, 0, 14, None)
    assert [torch.equal(a[0], b[0]) for a, b in zip(resumed, whole, strict=True)] == [True, True]
    assert hook.ranks_differ
    assert not Hierarchical.ranks_differ
