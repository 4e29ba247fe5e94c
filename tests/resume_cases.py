"""Runs with everything that has a state, stopped at chosen points and resumed, beside the run that was never stopped."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from samestep.callbacks import Callback, EarlyStopping
from samestep.callbacks.logger import Logger
from samestep.strategies import DDPStrategy
from samestep.strategies.comm_hooks import CommHook, Hierarchical, PostLocalSGD, PowerSGD
from samestep.trainer import Task, Trainer
from samestep.trainer.resume_check.digest import digest
from tasks import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, PearsonCorrCoef

BATCHES, EPOCHS = 7, 2
Stop = tuple[str, int]
"""Where a checkpoint is asked for: "batch" or "step" and the number of micro-batches or steps done; "validation" or "epoch"
and their number."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    strategy: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    hook: Callable[[], CommHook] | None = None
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    workers: int = 0
    kind: str = "everything"
    uneven: bool = False
    saving_matters: bool = False
    """Whether a save, which makes the ranks equal, is seen in what follows: then the resumed run saves, too."""
    stops: tuple[Stop, ...] = (("step", 3), ("epoch", 1))


SMALL = {"bucket_cap_mb": 0.0004}
HALF = {"accumulate_grad_batches": 2}
EAGER = {"compile_options": {"backend": "eager"}}
CASES = {
    case.name: case
    for case in (
        Case("plain", SMALL, stops=(("step", 1), ("batch", 5), ("step", 7), ("validation", 1), ("epoch", 1), ("step", 13))),
        Case("workers", SMALL, workers=1, stops=(("epoch", 1),)),
        Case("accumulate", SMALL, HALF, stops=(("batch", 3), ("step", 2), ("step", 4), ("batch", 10))),
        Case("static graph", {**SMALL, "static_graph": True}, stops=(("step", 1), ("step", 2), ("epoch", 1))),
        Case("static graph, accumulate", {**SMALL, "static_graph": True}, HALF, stops=(("step", 1), ("batch", 9))),
        Case("static graph, again", {**SMALL, "static_graph": True}, task={"again": True}, stops=(("step", 4),)),
        Case("static graph, unused", {**SMALL, "static_graph": True}, task={"unused": True}, stops=(("step", 5),)),
        Case("find unused", {**SMALL, "find_unused_parameters": True}, task={"unused": True}),
        Case("no views", {**SMALL, "gradient_as_bucket_view": False}),
        Case("no buffers in forward", {**SMALL, "forward_sync_buffers": False}, saving_matters=True),
        Case("sparse", SMALL, task={"sparse": True, "optimizer": "sgd"}),
        Case("clip, by value", SMALL, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, stops=(("step", 5),)),
        Case("bf16", SMALL, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}, stops=(("step", 4), ("epoch", 1))),
        Case("fp16", SMALL, {"precision": "16-mixed"}, task={"overflow": 3}, stops=(("step", 2), ("batch", 5), ("step", 8))),
        Case("hook fp16", {**SMALL, "comm_hook": "fp16"}),
        Case("hook bf16", {**SMALL, "comm_hook": "bf16"}, stops=(("step", 4),)),
        Case("hook quantize8", {**SMALL, "comm_hook": "quantize8"}),
        Case("hook powersgd", SMALL, hook=lambda: PowerSGD(rank=1, start_step=3), stops=(("step", 2), ("step", 6), ("epoch", 1))),
        Case("hook local", SMALL, hook=lambda: PostLocalSGD(start_step=2, period=3, ranks_per_node=1), saving_matters=True),
        Case("hook hierarchical", SMALL, hook=lambda: Hierarchical(ranks_per_node=1), stops=(("step", 5),)),
        Case("quantize8, static graph, accumulate", {**SMALL, "comm_hook": "quantize8", "static_graph": True}, HALF, stops=(("step", 3), ("step", 6))),
        Case("fused", {**SMALL, "fused_optimizer": True}, stops=(("step", 5),)),
        Case("in backward", {**SMALL, "optimizer_in_backward": True}),
        Case("sync batchnorm", {**SMALL, "sync_batchnorm": True}, stops=(("step", 5),)),
        Case("compile before", {"compile": "before_ddp", **EAGER}, stops=(("step", 5),), kind="compiled"),
        Case("compile after", {"compile": "after_ddp", **EAGER}, stops=(("step", 5),), kind="compiled"),
        Case("weighted", SMALL, HALF, task={"weighted": True}, stops=(("step", 3), ("epoch", 1), ("step", 7))),
        Case("join", {**SMALL, "uneven_inputs": "join"}, uneven=True, saving_matters=True, stops=(("step", 3), ("step", 6), ("epoch", 1))),
        Case("stop", {**SMALL, "uneven_inputs": "stop"}, uneven=True, stops=(("step", 3), ("epoch", 1))),
        Case("manual", SMALL, kind="manual", stops=(("step", 3), ("epoch", 1), ("step", 9))),
        Case("intervals", SMALL, {"val_check_interval": 3, "log_every_n_steps": 3}, stops=(("validation", 1), ("batch", 6), ("validation", 3))),
    )
}  # fmt: skip


class Numbers(Dataset[Any]):
    """Made-up samples, each with its number."""

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return x, torch.sin(x.sum()), index


class Everything(Task):
    """Dropout, BatchNorm, noise, two schedules, values of steps and epochs, and metrics that count."""

    def __init__(
        self, *, again: bool = False, unused: bool = False, sparse: bool = False, weighted: bool = False,
        overflow: int = -1, width: int = 12, optimizer: str = "adamw",
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.middle, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.embedding = nn.Embedding(42, width, sparse=True) if sparse else None
        self.spare = nn.Linear(3, 3) if unused else None
        self.again, self.weighted, self.overflow, self.optimizer = again, weighted, overflow, optimizer
        self.errors = MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)})
        self.mean, self.correlation = MeanMetric(), PearsonCorrCoef()
        self.val_mean = MeanMetric()
        self.asked = 0

    def predict(self, x: Tensor, index: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.embedding is not None:
            hidden = hidden + self.embedding(index)
        if self.again:
            for _ in range(2):
                hidden = torch.utils.checkpoint.checkpoint(
                    lambda h: torch.tanh(self.middle(h)), hidden, use_reentrant=True
                )
        else:
            hidden = hidden + torch.tanh(self.middle(hidden))
        return self.last(nn.functional.dropout(hidden, 0.2, self.training)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        predicted = self.predict(x + 0.1 * torch.randn_like(x) + 0.01 * random.random(), index)
        each = (predicted.float() - y).square()
        loss = each.mean()
        self.record(each, predicted.detach().float(), y, batch_idx)
        if self.trainer.progress.batches_seen == self.overflow:
            loss = loss * torch.inf
        return {"loss": each.sum(), "weight": float(len(y) + batch_idx % 2)} if self.weighted else loss

    def record(self, each: Tensor, predicted: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("loss", each.mean(), on_step=True, on_epoch=True)
        self.log("sum", each.sum(), on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("most", each.max(), on_step=False, on_epoch=True, reduce_fx=max)
        self.log("own", each.mean(), on_step=False, on_epoch=True, sync_dist=False)
        if batch_idx == 1:
            self.log("early", each.mean(), on_step=False, on_epoch=True)
            self.log("now and then", float(batch_idx))
        self.errors.update(predicted, y)
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.mean.update(predicted)
        self.correlation.update(predicted, y)

    def on_train_epoch_start(self) -> None:
        torch.rand(3)  # once more in a resumed run
        self.log("epochs", 1.0, reduce_fx="sum")
        self.mean.reset()

    def on_train_epoch_end(self) -> None:
        self.log("by hand", self.mean)
        self.log("correlation", self.correlation.compute() if self.trainer.world_size == 1 else 0.0)
        self.correlation.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, index = batch
        loss = (self.predict(x, index) - y).square().mean()
        self.log("val", loss)
        self.val_mean.update(loss)
        self.log("val mean", self.val_mean)

    def configure_optimizers(self) -> Any:
        parameters = [p for name, p in self.named_parameters() if not name.startswith("spare")]
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(parameters, lr=0.05)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=0.02)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": warm, "interval": "step"}, {"scheduler": plateau, "monitor": "val"}]


class Compiled(Everything):
    """What a graph can hold as a whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        loss = (self.predict(x + 0.1 * torch.randn_like(x), index) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class TwoOptimizers(Everything):
    """Manual optimization: two optimizers, each stepped by its own rule."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        body, head = self.optimizers()
        for optimizer, often in ((body, 1), (head, 2)):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if batch_idx % often == 0:
                optimizer.step()
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        body = torch.optim.Adam([*self.first.parameters(), *self.norm.parameters(), *self.middle.parameters()], lr=0.01)
        head = torch.optim.SGD(self.last.parameters(), lr=0.05, momentum=0.9)
        return [body, head], [torch.optim.lr_scheduler.ExponentialLR(body, 0.9)]


class Lines(Logger):
    """Keeps what it is given."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.seen.append(("logged", step, dict(metrics)))


class Trace(Callback):
    """Notes all that can be seen of a run, in order; and saves where it is told to."""

    def __init__(self, folder: Path, stops: tuple[Stop, ...]) -> None:
        self.folder, self.stops, self.seen = folder, stops, list[Any]()
        self.marks: dict[Stop, int] = {}
        """What had been seen when each checkpoint was written."""
        self.asked = set[Stop]()
        self.hooks_fired = 0

    def state_dict(self) -> dict[str, Any]:
        return {"hooks_fired": self.hooks_fired}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.hooks_fired = state_dict["hooks_fired"]

    def note(self, name: str, *what: Any) -> None:
        self.hooks_fired += 1
        self.seen.append((name, self.hooks_fired, *what))

    def save(self, trainer: Trainer, kind: str, count: int) -> None:
        if (kind, count) in self.stops and (kind, count) not in self.asked:  # a skipped step is no other step
            self.asked.add((kind, count))
            trainer.save_checkpoint(self.folder / f"{kind}-{count}")

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self.marks["any", len(self.marks)] = len(self.seen)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        self.note("batch", trainer.current_epoch, batch_idx, trainer.global_step, batch[2].tolist())

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss")
        self.note("batch end", None if loss is None else float(loss), digest(task.state_dict()))
        self.save(trainer, "batch", trainer.progress.batches_seen)

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.note("step end", trainer.global_step, rates, digest(torch.get_rng_state()))
        self.save(trainer, "step", trainer.global_step)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self.note("validation")

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self.note("validation end", values(trainer.callback_metrics))
        self.save(trainer, "validation", trainer.progress.validations)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self.note("epoch end", trainer.current_epoch, values(trainer.callback_metrics))
        self.save(trainer, "epoch", trainer.progress.epochs_done)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.note("train end", trainer.progress.state_dict())


def values(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class Batches:
    """The micro-batches of a rank that has others than its peers, and fewer."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        data = Numbers()
        for start in range(self.length):
            rows = [data[(7 * self.rank + 2 * start + row) % 42] for row in range(2)]
            yield (
                torch.stack([x for x, _, _ in rows]),
                torch.stack([y for _, y, _ in rows]),
                torch.tensor([i for *_, i in rows]),
            )


def run(
    case: Case, folder: Path, rank: int, resume_from: Path | None, stops: tuple[Stop, ...]
) -> tuple[Trace, dict[str, Any]]:
    """Train; return what was seen, and the state at the end."""
    torch.manual_seed(5)
    random.seed(5)
    strategy = dict(case.strategy)
    if case.hook is not None:
        strategy["comm_hook"] = case.hook()
    trace = Trace(folder, stops)
    stopping = EarlyStopping("val", patience=100)
    options: dict[str, Any] = {"log_every_n_steps": 2, **case.trainer}
    trainer = quiet_trainer(
        strategy=DDPStrategy(**strategy), callbacks=[trace, stopping], max_epochs=EPOCHS, seed=1, logger=Lines(trace.seen),
        limit_train_batches=BATCHES, limit_val_batches=2, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    if trainer.strategy.scaler is not None:  # grows every 3 steps, so that its counter matters
        scale = {
            "scale": 1024.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 0,
        }
        trainer.strategy.load_state_dict({"scaler": scale})
    kinds: dict[str, type[Everything]] = {"manual": TwoOptimizers, "compiled": Compiled}
    task = kinds.get(case.kind, Everything)(**case.task)
    if case.uneven:
        training: Any = Batches(rank, BATCHES - 2 * (rank == 0))
    else:
        training = DataLoader(Numbers(), 2, shuffle=True, num_workers=case.workers)
    trainer.fit(task, training, DataLoader(Numbers(), 3), ckpt_path=resume_from)
    end = {
        "model": copy.deepcopy(task.state_dict()),
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "strategy": trainer.strategy.state_dict(),
        "rank": trainer.strategy.rank_state_dict(),
        "stopping": stopping.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "callback_metrics": values(trainer.callback_metrics),
        "metric_steps": trainer.metric_steps,
    }
    return trace, end


def differences(names: list[str], folder: str, rank_of: Callable[[], int]) -> list[str]:
    """For each case and stop, the first thing that differs between the resumed run and the one that was never stopped."""
    found: list[str] = []
    rank = rank_of()
    for name in names:
        case = CASES[name]
        place = Path(folder) / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, end = run(case, place, rank, None, case.stops)
            marks = list(whole.marks.values())
            if len(marks) != len(case.stops):
                found.append(f"{name}: {len(marks)} of {len(case.stops)} checkpoints were written")
                continue
            written = sorted(
                case.stops, key=lambda stop: (place / "-".join(map(str, stop)) / "manifest.json").stat().st_mtime_ns
            )
            for stop, mark in zip(written, marks, strict=True):
                later = tuple(other for other in written[written.index(stop) + 1 :] if case.saving_matters)
                resumed, its_end = run(case, place / "resumed", rank, place / "-".join(map(str, stop)), later)
                difference = first_difference(whole.seen[mark:], resumed.seen) or first_difference(
                    list(end.items()), list(its_end.items())
                )
                if difference:
                    found.append(f"{name}, {stop}, rank {rank}: {difference}")
    return found


def first_difference(expected: list[Any], got: list[Any]) -> str:
    for index, (mine, theirs) in enumerate(zip(expected, got, strict=False)):
        if digest(mine) != digest(theirs):
            return f"entry {index}: expected {shortened(mine)}, got {shortened(theirs)}"
    return (
        ""
        if len(expected) == len(got)
        else f"expected {len(expected)} entries, got {len(got)}: {got[len(expected) : len(expected) + 3]}"
    )


def shortened(entry: Any) -> str:
    return str(entry)[:600]
