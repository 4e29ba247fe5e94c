"""Random numbers of a dataset: others on each rank, in each worker and epoch; or a function of the sample alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.trainer.randomness import rng_state
from simulated_ranks import prepared
from tasks import ScalarWeight, parameters_of, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset[Any]):
    """Each sample is its index, with a number from each of the three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class InBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def samples(loader: Any, epoch: int, skip: int = 0) -> dict[int, tuple[float, ...]]:
    loader.set_epoch(epoch)
    return {int(sample[0]): tuple(sample[1:].tolist()) for batch in loader.batches(skip) for sample in batch}


def data_loader(data: Any, size: int, workers: int, **options: Any) -> DataLoader[Any]:
    context = "fork" if workers else None
    return DataLoader(data, size, num_workers=workers, multiprocessing_context=context, **options)


def test_a_sample_s_random_numbers_do_not_depend_on_ranks_workers_or_batches() -> None:
    expected = [samples(prepared(data_loader(Augmented(), 1, 0), per_sample_seed=True), epoch) for epoch in (0, 1)]
    for numbers in zip(*expected[0].values(), strict=True):
        assert len(set(numbers)) == 12
    assert all(expected[0][index] != expected[1][index] for index in range(12))
    other = samples(prepared(data_loader(Augmented(), 1, 0), per_sample_seed=True, seed=1), 0)
    assert all(other[index] != expected[0][index] for index in range(12))
    for ranks, workers, data, size in (
        (1, 0, Augmented, 5), (2, 0, InBatches, 3), (3, 0, Augmented, 2), (1, 2, InBatches, 4), (2, 1, Augmented, 3),
        (3, 2, Augmented, 1),
    ):  # fmt: skip
        found: list[dict[int, Any]] = [{}, {}]
        for rank in range(ranks):
            given = data_loader(data(), size, workers, shuffle=True, persistent_workers=workers > 0)
            loader = prepared(given, rank, ranks, per_sample_seed=True, training=False)
            for epoch in (0, 1):
                found[epoch] |= samples(loader, epoch)
        assert found == expected, (ranks, workers, size)


def test_an_epoch_that_is_gone_on_with_draws_the_same() -> None:
    whole = samples(prepared(data_loader(Augmented(), 2, 0), per_sample_seed=True), 3)
    for workers, skip in ((0, 1), (0, 4), (2, 2)):
        rest = samples(prepared(data_loader(Augmented(), 2, workers), per_sample_seed=True), 3, skip)
        assert rest == {index: whole[index] for index in range(2 * skip, 12)}


def test_the_random_numbers_of_the_process_stay_as_they_were() -> None:
    for data in (Augmented(), InBatches()):
        before = rng_state()
        samples(prepared(data_loader(data, 2, 0), per_sample_seed=True), 0)
        after = rng_state()
        assert before["python"] == after["python"]
        assert before["numpy"] == after["numpy"]
        assert torch.equal(before["torch"], after["torch"])


@pytest.mark.parametrize("kind", ["batches", "batch sampler", "single", "sampler"])
def test_every_way_to_index_carries_the_epoch(kind: str) -> None:
    options: dict[str, Any] = {
        "batches": {"batch_size": 3, "shuffle": True},
        "batch sampler": {"batch_sampler": [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9, 10, 11]]},
        "single": {"batch_size": None},
        "sampler": {"sampler": [3, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11], "batch_size": 2},
    }[kind]
    expected = samples(prepared(data_loader(Augmented(), 1, 0), per_sample_seed=True), 0)
    loader = prepared(DataLoader(Augmented(), **options), per_sample_seed=True)
    loader.set_epoch(0)
    read = [batch if batch.dim() == 2 else batch[None] for batch in loader.batches()]
    assert {int(sample[0]): tuple(sample[1:].tolist()) for batch in read for sample in batch} == expected


def test_a_loader_that_is_not_dealt_is_refused() -> None:
    sampler = DistributedSampler(Augmented(), 2, 0)
    for given, options in (
        (DataLoader(Augmented(), 2, sampler=sampler), {}),
        ([torch.ones(2)], {}),
        (DataLoader(Augmented(), 2), {"enabled": False}),
    ):
        with pytest.raises(ValueError, match=r"per_sample_seed=True with a .* whose samples are not dealt"):
            prepared(given, per_sample_seed=True, **options)


def test_workers_draw_other_numbers_on_each_rank_in_each_worker_and_epoch_and_the_same_again() -> None:
    def drawn(seed: int = 0) -> dict[Any, float]:
        found: dict[Any, float] = {}
        for rank in range(2):
            loader = prepared(data_loader(Augmented(), 1, 2), rank, 2, seed=seed)
            for epoch in range(2):
                for index, numbers in samples(loader, epoch).items():
                    found |= {(rank, epoch, index, which): number for which, number in enumerate(numbers)}
        return found

    first = drawn()
    assert len(first) == len(set(first.values())) == 2 * 2 * 6 * 3
    assert drawn() == first
    assert not set(drawn(seed=1).values()) & set(first.values())


# --- through a run -----------------------------------------------------------------------------


class Dropping(ScalarWeight):
    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.drop, self.seen = nn.Dropout(0.5), list[Any]()
        self.started = self.w.item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += [(self.current_epoch, *sample) for sample in batch.tolist()]
        self.dropped = self.drop(torch.ones(64)).nonzero().flatten().tolist()
        return (self.w * batch[:, 1:]).mean() * self.drop(torch.ones(())).item()


def trained(folder: str, workers: int, size: int, jobs: list[Any]) -> list[Any]:
    found: list[Any] = []
    for name, stop, path in jobs:
        task, keep = Dropping(), ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=2,
            max_steps=stop,
            seed=4,
            precision=64,
            per_sample_seed=True,
            callbacks=[keep],
            enable_checkpointing=True,
        )
        # A worker of a rank would import torch anew.
        trainer.fit(task, data_loader(Augmented(), size, workers, shuffle=True), ckpt_path=path)
        found.append((sorted(task.seen), parameters_of(task).tolist(), task.dropped))
    return found


def test_a_fit_sees_the_same_augmented_samples_on_any_ranks_and_workers_and_after_a_resume(tmp_path: Path) -> None:
    (one,) = trained(str(tmp_path / "one"), 0, 6, [("whole", -1, None)])
    two = run_ranks(trained, 2, str(tmp_path / "two"), 2, 3, [
        ("whole", -1, None), ("again", -1, f"{tmp_path}/two/whole/step-00000001"),
    ])  # fmt: skip
    seen = sorted(sample for rank in two for sample in rank[0][0])
    assert seen == one[0]
    for whole, resumed in two:
        assert resumed[0] == [sample for sample in whole[0] if sample in resumed[0]]
        assert len(resumed[0]) == len(whole[0]) - 3
        assert resumed[1:] == whole[1:]
    assert two[0][0][2] != two[1][0][2], "dropout is the same on both ranks"


def test_reloaded_loaders_are_those_of_the_right_epoch_also_after_a_resume(tmp_path: Path) -> None:
    from samestep.trainer import DataModule

    class Data(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[Any] = []

        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            self.asked.append(("train", self.trainer.current_epoch))
            base = 100.0 * self.trainer.current_epoch
            return DataLoader(torch.arange(base, base + 8)[:, None], 2)

        def val_dataloader(self) -> Any:
            assert self.trainer is not None
            self.asked.append(("val", self.trainer.current_epoch))
            return DataLoader(torch.arange(4.0)[:, None] + 1000 * self.trainer.current_epoch, 2)

    class Seen(ScalarWeight):
        def __init__(self) -> None:
            super().__init__(lr=0.001)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.current_epoch, batch.flatten().tolist()))
            return (self.w * batch).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append((self.current_epoch, batch.flatten().tolist()))

    def run(name: str, path: str | None) -> tuple[Any, Any, list[str]]:
        task, data = Seen(), Data()
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=5,
            reload_dataloaders_every_n_epochs=2,
            callbacks=[keep],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
        )
        trainer.fit(task, datamodule=data, ckpt_path=path)
        return task.seen, data.asked, list(keep.kept)

    whole, asked, paths = run("whole", None)
    assert asked == [(kind, epoch) for epoch in (0, 2, 4) for kind in ("train", "val")]
    assert {epoch: batch[0] // 100 for epoch, batch in whole if batch[0] % 100 == 0 and batch[0] < 1000} == {
        0: 0,
        1: 0,
        2: 2,
        3: 2,
        4: 4,
    }
    for step in (1, 4, 6, 14, 15, 16):
        seen, asked_again, _ = run(f"from-{step}", paths[step - 1])
        validated = 2 * (step // 4)
        assert seen == whole[step + validated :], step
        assert asked_again[0] == ("train", {1: 0, 4: 0, 6: 0, 14: 2, 15: 2, 16: 4}[step])
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=2 with loaders given to fit"):
        quiet_trainer(reload_dataloaders_every_n_epochs=2).fit(Seen(), DataLoader(torch.ones(4, 1)))
