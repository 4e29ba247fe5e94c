"""Every pair of DDP's levers: trained on two ranks, beside a reference written by hand in one process.

python tests/ddp_matrix.py          writes docs/ddp-matrix.md
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from run_ranks import run_ranks
from samestep.strategies import DDPStrategy
from samestep.strategies.comm_hooks import BF16, FP16, CommHook, Compressed, Hierarchical, Int8, PostLocalSGD, PowerSGD
from samestep.trainer import Task
from tasks import parameters_of, quiet_trainer
from torch import Tensor, nn

STEPS, RANKS, ROWS = 50, 2, 4


@dataclass(frozen=True)
class Lever:
    """One choice, the options that make it, and how far from the reference it may take the parameters."""

    name: str
    strategy: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    hook: Callable[[], CommHook] | None = None
    """Makes the communication hook, which is of one trainer."""
    tolerance: float = 1e-12
    """Largest difference of a parameter after all steps, relative to the largest parameter."""


EAGER = {"backend": "eager"}
LEVERS = {
    lever.name: lever
    for lever in (
        Lever("plain"),
        Lever("accumulate 3", trainer={"accumulate_grad_batches": 3}),
        Lever("clip", trainer={"gradient_clip_val": 0.3}),
        Lever("bf16-mixed", trainer={"precision": "bf16-mixed"}, tolerance=2e-3),
        Lever("16-mixed", trainer={"precision": "16-mixed"}, tolerance=2e-4),
        Lever("compile before", {"compile": "before_ddp", "compile_options": EAGER}),
        Lever("compile after", {"compile": "after_ddp", "compile_options": EAGER}),
        Lever("static_graph", {"static_graph": True}),
        Lever("find_unused", {"find_unused_parameters": True}),
        Lever("bucket list", {"bucket_cap_mb_list": [0.0002, 0.0004, 1]}),
        Lever("fp16", hook=lambda: Compressed(FP16()), tolerance=1e-3),
        Lever("bf16", hook=lambda: Compressed(BF16()), tolerance=2e-3),
        Lever("quantize8", hook=lambda: Compressed(Int8()), tolerance=1e-2),
        Lever("powersgd", hook=lambda: PowerSGD(rank=1, start_step=5), tolerance=3e-2),
        Lever("post_local_sgd", hook=lambda: PostLocalSGD(start_step=10, period=5, ranks_per_node=1), tolerance=5e-2),
        Lever("hierarchical", hook=lambda: Hierarchical(ranks_per_node=1)),
        Lever("sync_batchnorm", {"sync_batchnorm": True}),
        Lever("in backward", {"optimizer_in_backward": True}),
        Lever("join", {"uneven_inputs": "join"}),
        Lever("stop", {"uneven_inputs": "stop"}),
    )
}
KINDS = (
    {"bf16-mixed", "16-mixed"},
    {"compile before", "compile after"},
    {"fp16", "bf16", "quantize8", "powersgd", "post_local_sgd", "hierarchical"},
    {"join", "stop"},
)
"""Levers that are values of the same option: there is no pair of them."""


def pairs() -> Iterator[tuple[str, str]]:
    """All pairs, each lever with `plain` among them."""
    for first, second in itertools.combinations(LEVERS, 2):
        if not any({first, second} <= kind for kind in KINDS):
            yield first, second


class Net(nn.Module):
    """Small, with BatchNorm, several buckets' worth of parameters, and one layer that some steps leave out."""

    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1) if spare else None

    def forward(self, x: Tensor, use_spare: bool) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        y = self.last(hidden)
        if self.spare is not None and use_spare:
            y = y + self.spare(hidden)
        return y.squeeze(1)


def uses_spare(rank: int, batch_idx: int) -> bool:
    return (batch_idx + rank) % 3 != 0


class MatrixTask(Task):
    """Regression with the small net."""

    def __init__(self, rank: int, *, spare: bool) -> None:
        super().__init__()
        self.net, self.rank = Net(spare=spare), rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        # Without the layer, always the same: compiled code is made for each value.
        use_spare = self.net.spare is not None and uses_spare(self.rank, batch_idx)
        loss = nn.functional.mse_loss(self.net(x, use_spare), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9, weight_decay=0.01)


class Batches:
    """The micro-batches of a rank, made up from their numbers."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch_of(self.rank, index) for index in range(self.length))


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.sin(x.sum(1))


def lengths(names: Collection[str]) -> list[int]:
    """Micro-batches of each rank. Where they may differ, rank 0's end earlier, inside a window."""
    window = LEVERS["accumulate 3"].trainer["accumulate_grad_batches"] if "accumulate 3" in names else 1
    uneven = "join" in names or "stop" in names
    return [(STEPS - 10) * window - (window > 1) if uneven else STEPS * window, STEPS * window]


# --- on two ranks, by the trainer ------------------------------------------------------------


def refusal(names: tuple[str, ...]) -> str:
    """Why the levers can't go together; empty where they can. Nothing is started."""
    try:
        _trainer(names)
    except ValueError as error:
        return str(error)
    return ""


def train(names: tuple[str, ...]) -> Tensor:
    """The parameters after training with the levers."""
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    task = MatrixTask(rank, spare="find_unused" in names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trainer(names).fit(task, Batches(rank, lengths(names)[rank]))
    return parameters_of(task)


def train_all(several: list[tuple[str, ...]]) -> list[Tensor]:
    """As `train`, for one after the other in the same processes."""
    return [train(names) for names in several]


def _trainer(names: tuple[str, ...]) -> Any:
    strategy: dict[str, Any] = {}
    trainer: dict[str, Any] = {"precision": "64-true"}
    for name in names:
        lever = LEVERS[name]
        strategy |= lever.strategy if lever.hook is None else {"comm_hook": lever.hook()}
        trainer |= lever.trainer
    return quiet_trainer(strategy=DDPStrategy(**strategy), max_epochs=1, **trainer)


# --- in one process, by hand -----------------------------------------------------------------


CHANGE_THE_TRAINING = {
    "accumulate 3", "clip", "bf16-mixed", "16-mixed", "find_unused", "sync_batchnorm", "join", "stop",
}  # fmt: skip
"""Levers that are other mathematics; the rest must not be seen in the result, or only as far as they round."""


@cache
def reference(names: frozenset[str]) -> Tensor:
    """The parameters after the same training, written out: each step's gradient is the mean over what is there."""
    torch.manual_seed(0)
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    half = next((mixed[name] for name in names if name in mixed), None)
    dtype = torch.float64 if half is None else torch.float32
    net = Net(spare="find_unused" in names).to(dtype)
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", enabled="16-mixed" in names)
    window = 3 if "accumulate 3" in names else 1
    ends = lengths(names)
    for step in range(STEPS):
        begin = step * window
        counts = [max(0, min(window, end - begin)) for end in ends]
        if "stop" in names:
            counts = [min(counts)] * RANKS
        if not any(counts):
            break
        optimizer.zero_grad()
        for index in range(max(counts)):
            present = [rank for rank in range(RANKS) if index < counts[rank]]
            losses = _losses(net, present, begin + index, dtype, half, union="sync_batchnorm" in names)
            scaler.scale(sum(losses, torch.zeros(())) * RANKS / sum(counts)).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= RANKS  # here, as DDP does: in float16 a smaller loss would overflow later
        scaler.unscale_(optimizer)
        if "clip" in names:
            nn.utils.clip_grad_norm_(net.parameters(), LEVERS["clip"].trainer["gradient_clip_val"])
        scaler.step(optimizer)
        scaler.update()
    return parameters_of(net).detach()


def _losses(
    net: Net, ranks: list[int], index: int, dtype: torch.dtype, half: torch.dtype | None, *, union: bool
) -> list[Tensor]:
    batches = [tuple(part.to(dtype) for part in batch_of(rank, index)) for rank in ranks]
    losses: list[Tensor] = []
    if not union:
        for rank, (x, y) in zip(ranks, batches, strict=True):
            with _autocast(
                half
            ):  # one for each rank: within it, gradients of a weight would be summed in half precision
                losses.append(nn.functional.mse_loss(net(x, uses_spare(rank, index)), y))
        return losses
    with _autocast(half):
        hidden = torch.tanh(net.norm(net.first(torch.cat([x for x, _ in batches]))))
        for rank, part, (_, y) in zip(ranks, hidden.split(ROWS), batches, strict=True):
            out = net.last(part)
            if net.spare is not None and uses_spare(rank, index):
                out = out + net.spare(part)
            losses.append(nn.functional.mse_loss(out.squeeze(1), y))
    return losses


def _autocast(half: torch.dtype | None) -> Any:
    return nullcontext() if half is None else torch.autocast("cpu", half)


# --- the table -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a pair came to."""

    names: tuple[str, ...]
    refusal: str = ""
    difference: float = 0.0
    """Of the parameters, from the reference, relative to the largest."""
    ranks_equal: bool = True

    @property
    def tolerance(self) -> float:
        """The larger of the levers'."""
        return max(LEVERS[name].tolerance for name in self.names)


def results(several: list[tuple[str, ...]]) -> list[Result]:
    """Try the pairs, those that are not refused on two ranks."""
    found = {names: Result(names, refusal(names)) for names in several}
    accepted = [names for names in several if not found[names].refusal]
    first, second = run_ranks(train_all, RANKS, accepted, timeout=600)
    for names, mine, theirs in zip(accepted, first, second, strict=True):
        right = reference(frozenset(names) & CHANGE_THE_TRAINING)
        difference = float((mine.double() - right.double()).abs().max() / right.double().abs().max())
        found[names] = Result(names, "", difference, torch.equal(mine, theirs))
    return list(found.values())


def table(every: list[Result]) -> str:
    """The page docs/ddp-matrix.md."""
    cells = {result.names: result for result in every}
    names = list(LEVERS)
    marks = {name: str(number) for number, name in enumerate(names, 1)}
    lines = [
        "# Which levers go together",
        "",
        f"Written by `tests/ddp_matrix.py`, which trains each pair for {STEPS} steps on two ranks (CPU, gloo), and the same",
        "by hand in one process. `=`: equal to rounding (1e-12, float64); a number: the largest difference of a parameter",
        "that is allowed, relative to the largest parameter, since one of the two rounds or compresses; `refused`: an error",
        "when the Trainer is built (below); `·`: two values of one option. The ranks hold the same bits in every pair.",
        "The bucket list ends with a bucket of 1 MiB: `compile` refuses a list of smaller ones.",
        "",
        "| | " + " | ".join(marks.values()) + " |",
        "|---|" + "---|" * len(names),
    ]
    for row in names:
        line = [f"| {marks[row]} {row} "]
        for column in names:
            result = cells.get((row, column)) or cells.get((column, row))
            line.append("| " + ("" if row == column else "·" if result is None else _cell(result)) + " ")
        lines.append("".join(line) + "|")
    lines += ["", "## Refused", ""]
    lines += [f"- **{' + '.join(result.names)}**: {result.refusal}" for result in every if result.refusal]
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    if result.refusal:
        return "refused"
    return "=" if result.tolerance <= 1e-12 else f"{result.tolerance:g}"


if __name__ == "__main__":
    everything = results(list(pairs()))
    for wrong in everything:
        if not wrong.ranks_equal or wrong.difference > wrong.tolerance:
            print(wrong, file=sys.stderr)
    (Path(__file__).parent.parent / "docs" / "ddp-matrix.md").write_text(table(everything), "utf-8")
