"""Loaders and datasets that say where they are: saved by each rank, and gone on with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import CheckpointError
from tasks import ScalarWeight, parameters_of, quiet_trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # called by torchdata 0.11


class Stream(IterableDataset[float]):
    """Counts what it reads; with a state it goes on where it was."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.reads = length, 0, 0

    def __iter__(self) -> Iterator[float]:
        while self.at < self.length:
            self.at += 1
            self.reads += 1
            yield float(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Endless(Stream):
    """Goes on from epoch to epoch."""

    def __iter__(self) -> Iterator[float]:
        while True:
            self.at += 1
            yield float(self.at - 1)


class Drifting(Dataset[float]):
    """A map-style dataset whose samples depend on how many were read before."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        self.reads += 1
        return float(index + 100 * self.reads)

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Shuffling:
    """A loader of the user's own that draws its order from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.at:
            self.order = torch.randperm(12, generator=self.generator).tolist()
        while self.at < 12:
            self.at += 2
            yield torch.tensor(self.order[self.at - 2 : self.at], dtype=torch.float32)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])


def distributed(kind: Any) -> Any:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    return kind(range(24), world, rank, shuffle=True, seed=2)


def torchdatas(dataset: Any, workers: int, **options: Any) -> StatefulDataLoader[Any]:
    context = "fork" if workers else None
    return StatefulDataLoader(dataset, 2, num_workers=workers, multiprocessing_context=context, **options)


LOADERS: dict[str, Any] = {
    "torchdata, shuffled": lambda workers: torchdatas(range(24), workers, shuffle=True),
    "torchdata, its own distributed sampler": lambda workers: torchdatas(
        range(24), workers, sampler=distributed(StatefulDistributedSampler)
    ),
    "torchdata, torch's distributed sampler": lambda workers: torchdatas(range(24), workers, sampler=distributed(DistributedSampler)),
    "torchdata, a stream": lambda workers: torchdatas(Stream(24), workers),
    "torchdata, a drifting dataset": lambda workers: torchdatas(Drifting(), workers),
    "a stream": lambda workers: DataLoader(Stream(24), 2),
    "a drifting dataset": lambda workers: DataLoader(Drifting(), 2, shuffle=True),
    "a stream that never ends": lambda workers: DataLoader(Endless(0), 2),
    "a loader of one's own": lambda workers: Shuffling(),
}  # fmt: skip


class Seen(ScalarWeight):
    def __init__(self) -> None:
        super().__init__(lr=0.001)
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch.tolist())
        return (self.w * batch).mean()


def run(folder: str, path: str | None, kind: str, workers: int, options: dict[str, Any]) -> tuple[Any, list[str]]:
    logging.disable(logging.WARNING)  # torchdata says when it reads again what it has read
    task = Seen()
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    if kind == "a stream that never ends":
        options = {"limit_train_batches": 5, **options}
    trainer = quiet_trainer(max_epochs=2, seed=1, callbacks=[keep], enable_checkpointing=True, **options)
    trainer.fit(task, LOADERS[kind](workers), ckpt_path=path)
    return (task.batches, parameters_of(task).tolist()), list(keep.kept)


def differences(folder: str, kinds: list[str], workers: int, options: dict[str, Any]) -> list[Any]:
    """Of each run that went on from a checkpoint, what differs from the run that was never stopped."""
    found: list[Any] = []
    for number, kind in enumerate(kinds):
        whole, paths = run(f"{folder}/{number}", None, kind, workers, options)
        window = options.get("accumulate_grad_batches", 1)
        per_epoch = len(paths) // 2
        for stop in {1, per_epoch, per_epoch + 2} if not workers else {2}:
            resumed, _ = run(f"{folder}/{number}-{stop}", paths[stop - 1], kind, workers, options)
            done = stop * window if stop <= per_epoch else len(whole[0]) // 2 + (stop - per_epoch) * window
            done = min(done, len(whole[0]) // 2) if stop <= per_epoch else done
            if resumed != (whole[0][done:], whole[1]):
                found.append((kind, stop, resumed[0], whole[0][done:]))
        assert len(set(map(str, whole[0]))) > 1
    return found


@pytest.mark.parametrize(
    ("ranks", "workers", "options"),
    [(1, 0, {}), (1, 0, {"accumulate_grad_batches": 2}), (2, 0, {}), (2, 2, {})],
    ids=["plain", "windows", "ranks", "ranks and workers"],
)
def test_a_run_goes_on_where_each_rank_s_loader_was(
    ranks: int, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    kinds = ["torchdata, its own distributed sampler", "torchdata, a stream"] if workers else list(LOADERS)
    arguments = (str(tmp_path), kinds, workers, options)
    for found in run_ranks(differences, 2, *arguments, timeout=100) if ranks == 2 else [differences(*arguments)]:
        assert found == []


def test_another_number_of_workers_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    kind = "torchdata, its own distributed sampler"
    _, paths = run(str(tmp_path / "a"), None, kind, 0, {})
    with pytest.raises(CheckpointError, match="kept with num_workers = 0, here it is 2: expected the same"):
        run(str(tmp_path / "b"), paths[0], kind, 2, {})
    run(str(tmp_path / "d"), paths[11], kind, 2, {})  # an epoch's end


def test_torchdatas_shuffle_is_the_order_of_seed_and_epoch() -> None:
    """Its sampler draws a seed for itself when it is built, another one on each rank and in each run."""
    plain, stateful = Seen(), Seen()
    quiet_trainer(max_epochs=2, seed=1).fit(plain, DataLoader(range(24), 2, shuffle=True))
    torch.manual_seed(77)
    quiet_trainer(max_epochs=2, seed=1).fit(stateful, torchdatas(range(24), 0, shuffle=True))
    assert stateful.batches == plain.batches
