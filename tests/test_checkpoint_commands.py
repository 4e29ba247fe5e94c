"""`samestep ckpt`: ls, verify, diff, export."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from safetensors.torch import load_file
from samestep.callbacks import ModelCheckpoint
from samestep.trainer.__main__ import main
from samestep.trainer.checkpoint.compare import differences
from tasks import Regression, loader, quiet_trainer


class Noisy(Regression):
    """Draws random numbers while it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


def fit(folder: str, epochs: int = 3) -> list[str]:
    keep = ModelCheckpoint(
        dirpath=folder, filename="e{epoch}", monitor="val/loss", save_top_k=-1, save_last=True,
        auto_insert_metric_name=False,
    )  # fmt: skip
    trainer = quiet_trainer(max_epochs=epochs, precision=64, seed=1, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(Noisy(), loader(16, 4, shuffle=True), loader(8, 4))
    return list(keep.kept)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    fit(str(folder / "checkpoints"))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["ckpt", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls_shows_the_newest_first_with_its_marks(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "ls", run_folder)
    assert status == 0
    head, *rows = [line.split() for line in text.splitlines()]
    assert head == ["checkpoint", "step", "epoch", "made", "ranks", "size", "metrics"]
    assert [row[:3] for row in rows] == [["e2", "12", "2"], ["e1", "8", "1"], ["e0", "4", "0"]]
    assert [row[5] for row in rows] == ["1", "1", "1"]
    assert rows[0][-1] == "last"
    assert "val/loss" in text
    best = os.path.basename(os.path.realpath(run_folder / "checkpoints" / "best"))
    assert [row[0] for row in rows if "best," in row or "best" in row] == [best]
    status, text = said(capsys, "ls", run_folder / "checkpoints", "--json")
    told = json.loads(text)
    assert [(entry["step"], entry["world_size"], entry["problems"]) for entry in told] == [
        (12, 1, []), (8, 1, []), (4, 1, []),
    ]  # fmt: skip
    files = sum(file.stat().st_size for file in (run_folder / "checkpoints" / "e2").iterdir())
    assert told[0]["size"] == files - (run_folder / "checkpoints" / "e2" / "manifest.json").stat().st_size


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(str(tmp_path))
    assert said(capsys, "verify", tmp_path) == (
        0,
        "".join(f"{tmp_path / name}: intact\n" for name in ("e2", "e1", "e0")),
    )
    damage(tmp_path / "e1" / "training.pt")
    (tmp_path / "e0" / "rank-00000.pt").unlink()
    status, text = said(capsys, "verify", tmp_path / "e2", tmp_path / "e1", tmp_path / "e0")
    assert status == 1
    assert f"{tmp_path / 'e2'}: intact" in text
    assert f"{tmp_path / 'e1' / 'training.pt'} is damaged: its checksum differs" in text
    assert f"{tmp_path / 'e0' / 'rank-00000.pt'} can't be read: No such file or directory" in text
    status, text = said(capsys, "verify", "--json", tmp_path)
    assert (status, [bool(problems) for problems in json.loads(text).values()]) == (1, [False, True, True])
    status, text = said(capsys, "ls", tmp_path)
    marks = {line.split()[0]: "damaged" in line for line in text.splitlines()[1:]}
    assert (status, marks) == (1, {"e2": False, "e1": False, "e0": True}), "ls looks at sizes only"
    status, text = said(capsys, "ls", "--verify", tmp_path)
    assert [("damaged" in line) for line in text.splitlines()[1:]] == [False, True, True]
    (tmp_path / "e1" / "manifest.json").unlink()
    assert said(capsys, "verify", tmp_path / "e1")[0] == 1, "what is left of one"


def test_verify_takes_the_folder_of_a_run_and_says_when_there_is_nothing(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "".join(f"{run_folder / 'checkpoints' / name}: intact\n" for name in ("e2", "e1", "e0"))
    assert said(capsys, "verify", run_folder) == (0, whole)
    nothing = f"samestep ckpt verify: there is no checkpoint in {tmp_path}\n"
    assert said(capsys, "verify", tmp_path) == (2, nothing)
    assert said(capsys, "verify", tmp_path / "none") == (
        2,
        f"samestep ckpt verify: {tmp_path / 'none'} is no folder.\n",
    )


def test_diff_tells_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = fit(str(tmp_path / "a"), epochs=1)[0]
    again = fit(str(tmp_path / "a2"), epochs=1)[0]
    found = differences(Path(first), Path(again))
    assert {d.where.split(" ")[0] for d in found} == {"training"}
    assert all("callbacks" in d.where for d in found), "but for the folders' names, two equal runs are equal bitwise"
    assert said(capsys, "diff", first, first) == (
        0,
        "equal bitwise: weights, optimizers, schedulers, progress, random numbers, metrics\n",
    )
    other = fit(str(tmp_path / "b"), epochs=2)[1]
    status, text = said(capsys, "diff", first, other, "--limit", 3)
    assert status == 1
    lines = text.splitlines()
    assert lines[0].split() == ["where", "first", "second", "greatest", "difference"]
    assert lines[1].startswith("model net.0.bias")
    assert "more (--limit 0 prints all)" in lines[4]
    told = json.loads(said(capsys, "diff", first, other, "--json")[1])
    by_place = {entry["where"]: entry for entry in told}
    weights = [load_file(Path(path) / "model.safetensors")["net.2.weight"].double() for path in (first, other)]
    assert by_place["model net.2.weight"]["greatest"] == (weights[0] - weights[1]).abs().max().item() > 0
    assert any(place.startswith("training optimizer_states 0 state 0 momentum") for place in by_place)
    assert by_place["training progress global_step"] | {"where": ""} == {
        "where": "", "first": "4", "second": "8", "greatest": 4,
    }  # fmt: skip
    assert "rank 0: rng torch" in by_place
    assert "manifest metrics val/loss" in by_place


def test_diff_sees_other_types_missing_names_and_the_sign_of_zero(tmp_path: Path) -> None:
    from samestep.trainer.checkpoint.compare import _compare

    def places(first: Any, second: Any) -> list[tuple[str, float | None]]:
        return [(found.where, found.greatest) for found in _compare("x", first, second)]

    nan = float("nan")
    assert places({"a": torch.tensor([nan]), "b": nan}, {"a": torch.tensor([nan]), "b": nan}) == []
    assert places({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}) == [("x a", 0.0)]
    assert places({"a": torch.ones(2)}, {"a": torch.ones(2).double()}) == [("x a", 0.0)]
    assert places({"a": torch.ones(2)}, {"a": torch.ones(3)}) == [("x a", None)]
    assert places({"a": 1, "c": 2}, {"b": 1, "c": True}) == [("x a", None), ("x c", None), ("x b", None)]
    assert places({"a": torch.tensor([nan, 1.0])}, {"a": torch.tensor([3.0, 1.0])}) == [("x a", float("inf"))]
    assert places([list(range(700))], [list(range(1, 701))]) == [("x 0", None)]


def two_ranks(folder: str) -> list[str]:
    return fit(folder, 1)


def test_all_ranks_states_are_compared_and_weights_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run_ranks(two_ranks, 2, str(tmp_path / "two"))[0][0])
    other = Path(run_ranks(two_ranks, 1, str(tmp_path / "one"))[0][0])
    text = said(capsys, "diff", "--json", path, other)[1]
    assert any(entry["where"] == "rank 1:" and entry["second"] == "(not there)" for entry in json.loads(text))
    task = Regression().double()
    status, text = said(capsys, "export", path, tmp_path / "w.safetensors")
    assert (status, text[: text.index("(")]) == (0, f"4 tensors of step 2 in {tmp_path / 'w.safetensors'} ")
    task.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert said(capsys, "export", path, tmp_path / "w.pt", "--format", "torch")[0] == 0
    plain = torch.load(tmp_path / "w.pt", weights_only=True)
    assert all(torch.equal(plain[name], value) for name, value in task.state_dict().items())
    assert plain.keys() == task.state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nowhere"], "nowhere is no folder: expected one with checkpoints"),
        (["export", "nowhere", "out"], "nowhere is no checkpoint: there is no such folder"),
        (["diff", "nowhere", "nowhere"], "nowhere is no checkpoint"),
    ],
)
def test_what_is_not_there_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, *arguments)
    assert status == 2
    assert text.startswith(f"samestep ckpt {arguments[0]}: {message}")
    assert text.count("\n") == 1


def test_export_replaces_nothing(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    status, text = said(capsys, "export", run_folder / "checkpoints" / "e0", tmp_path / "mine")
    assert (status, "is there already" in text, (tmp_path / "mine").read_text()) == (2, True, "mine")
