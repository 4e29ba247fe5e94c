"""Several training loaders at once: their lengths, their order, and going on inside an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import ModelCheckpoint
from samestep.trainer import CombinedLoader
from simulated_ranks import batches, dealt_back, prepared
from tasks import ScalarWeight, parameters_of, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset


def loaders() -> dict[str, Any]:
    return {"a": DataLoader(range(6), 4), "b": DataLoader(range(15), 5)}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [{"a": [0, 1, 2, 3], "b": [0, 1, 2, 3, 4]}, {"a": [4, 5], "b": [5, 6, 7, 8, 9]}]),
        (
            "max_size_cycle",
            [
                {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3, 4]},
                {"a": [4, 5], "b": [5, 6, 7, 8, 9]},
                {"a": [0, 1, 2, 3], "b": [10, 11, 12, 13, 14]},
            ],
        ),
        (
            "max_size",
            [
                {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3, 4]},
                {"a": [4, 5], "b": [5, 6, 7, 8, 9]},
                {"a": None, "b": [10, 11, 12, 13, 14]},
            ],
        ),
        ("sequential", [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]),
    ],
)
def test_each_mode_gives_what_lightnings_gives(mode: Any, expected: list[Any]) -> None:
    combined = prepared(CombinedLoader(loaders(), mode))
    assert batches(combined) == expected
    assert combined.length == len(expected)
    pair = prepared(CombinedLoader(list(loaders().values()), mode))
    assert batches(pair) == [list(batch.values()) if isinstance(batch, dict) else batch for batch in expected]


MODES: Any = ("min_size", "max_size_cycle", "max_size", "sequential")


class Items(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(11))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_left_of_an_epoch_is_the_tail_of_the_whole(mode: Any) -> None:
    for unsized in (False, True):
        for limit in (1.0, 4):

            def combined(rank: int, unsized: bool = unsized, limit: Any = limit) -> Any:
                parts: list[Any] = [DataLoader(range(7), 2, shuffle=True), DataLoader(range(20), 3, shuffle=True)]
                parts.append(DataLoader(Items(), 2) if unsized else DataLoader(range(4), 2))
                return prepared(CombinedLoader(tuple(parts), mode), rank, 2, limit=limit)

            for rank in (0, 1):
                epochs = [batches(combined(rank), epoch) for epoch in (0, 1)]
                assert epochs[0] != epochs[1]
                for skip in range(len(epochs[0]) + 1):
                    resumed = combined(rank)
                    assert batches(resumed, 0, skip) == epochs[0][skip:], (mode, unsized, limit, skip)
                    assert batches(resumed, 1) == epochs[1]


def test_a_loader_that_begins_anew_in_an_epoch_has_another_order_each_time() -> None:
    parts = {"short": DataLoader(range(6), 2, shuffle=True), "long": DataLoader(range(18), 2, shuffle=True)}
    combined = prepared(CombinedLoader(parts, "max_size_cycle"))
    orders: list[list[int]] = []
    for epoch in range(2):
        read = [item for batch in batches(combined, epoch) for item in batch["short"]]
        orders += [read[at : at + 6] for at in range(0, 18, 6)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(set(map(tuple, orders))) == 6


def test_each_part_is_dealt_to_the_ranks() -> None:
    for mode in MODES:
        one = batches(prepared(CombinedLoader({"a": DataLoader(range(12), 4), "b": DataLoader(range(24), 4)}, mode)))
        two = [
            batches(
                prepared(CombinedLoader({"a": DataLoader(range(12), 2), "b": DataLoader(range(24), 2)}, mode), rank, 2)
            )
            for rank in range(2)
        ]
        for step, whole in enumerate(one):
            first, second = two[0][step], two[1][step]
            if mode == "sequential":
                assert dealt_back([first, second]) == whole
                continue
            for name in ("a", "b"):
                assert (None if first[name] is None else dealt_back([first[name], second[name]])) == whole[name]


@pytest.mark.parametrize(
    ("iterables", "mode", "message"),
    [
        ({}, "min_size", "got a dict: expected a dict, list or tuple with one loader or more"),
        (DataLoader(range(3)), "min_size", "got a DataLoader"),
        ([DataLoader(range(3))], "longest", "mode='longest': expected one of 'min_size', 'max_size_cycle'"),
    ],
)
def test_what_is_no_combination_is_refused(iterables: Any, mode: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        CombinedLoader(iterables, mode)


class Seen(ScalarWeight):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append([part.tolist() for part in batch.values()] if isinstance(batch, dict) else batch.tolist())
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        return sum((self.w * part).mean() for part in parts) * 0.01

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((dataloader_idx, batch.tolist()))


def resumed_everywhere(folder: str, mode: Any) -> list[tuple[Any, Any]]:
    """A whole run beside one that went on at each of its steps, with parameters and batches."""

    def run(name: str, path: str | None) -> tuple[Any, list[str]]:
        task = Seen()
        keep = ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=1, save_top_k=-1)
        given: Any = {"a": DataLoader(range(8), 2, shuffle=True), "b": DataLoader(range(20), 2, shuffle=True)}
        trainer = quiet_trainer(max_epochs=2, seed=1, callbacks=[keep], enable_checkpointing=True, precision=64)
        trainer.fit(task, given if mode is None else CombinedLoader(given, mode), ckpt_path=path)
        return (task.batches, parameters_of(task).tolist()), list(keep.kept)

    whole, paths = run("whole", None)
    found: list[tuple[Any, Any]] = []
    for index in range(0, len(paths), 3):
        resumed, _ = run(f"from-{index}", paths[index])
        found.append((resumed, (whole[0][index + 1 :], whole[1])))
    return found


@pytest.mark.parametrize("mode", ["min_size", "sequential", None])
def test_a_fit_resumes_inside_an_epoch_of_several_loaders(mode: Any, tmp_path: Path) -> None:
    """None: a plain dict, which is read as max_size_cycle."""
    for rank in run_ranks(resumed_everywhere, 2, str(tmp_path), mode):
        for resumed, expected in rank:
            assert resumed == expected


def test_validation_takes_a_sequential_combination_as_a_list_and_refuses_the_others() -> None:
    task = Seen()
    data = loaders()
    quiet_trainer().validate(task, CombinedLoader(data, "sequential"))
    assert task.validated[0] == (0, [0, 1, 2, 3])
    assert task.validated[-1] == (1, [10, 11, 12, 13, 14])
    with pytest.raises(ValueError, match="'max_size', which repeats samples or leaves some out: expected a list"):
        quiet_trainer().validate(task, CombinedLoader(data, "max_size"))
    assert torch.equal(task.w, torch.ones(()))
