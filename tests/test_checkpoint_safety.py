"""Checkpoints outlive what may happen to them: kills, full disks, damage, divergence, crafted files, other versions."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import time
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import run_ranks as ranks_of_tests
import safetensors.torch
import torch
from run_ranks import errors_of_ranks, run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.trainer import CheckpointError, Task
from samestep.trainer.checkpoint import folder as folders
from samestep.trainer.checkpoint import migrations, newest_intact, read_checkpoint
from samestep.trainer.checkpoint.plain import check_plain
from tasks import Regression, ScalarWeight, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader


def ones(samples: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples), 1)


def fit(folder: Path, steps: int = 4, task: Task | None = None, ckpt_path: Any = None, **options: Any) -> Any:
    keep = ModelCheckpoint(**{"dirpath": folder, "every_n_train_steps": 1, "save_top_k": -1, **options})
    trainer = quiet_trainer(
        max_epochs=-1, max_steps=steps, seed=1, enable_checkpointing=True, callbacks=[keep], default_root_dir=folder
    )
    trainer.fit(task or ScalarWeight(), ones(100_000), ckpt_path=ckpt_path)
    return keep


def names(folder: Path) -> list[str]:
    """What a run left in its folder, but for its status and its links."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.is_symlink() and entry.name != "status.json")


def passing_over(folder: Path) -> Path | None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="samestep: passed over")
        return newest_intact([folder])


# --- kills -----------------------------------------------------------------------------------


def train_until_killed(folder: str) -> None:
    fit(Path(folder), 100_000, save_top_k=1, save_last=True, ckpt_path="auto")


def save_over_and_over(folder: str) -> None:
    class Saves(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            trainer.save_checkpoint(Path(folder) / "one")

    trainer = quiet_trainer(max_epochs=1, callbacks=[Saves()])
    trainer.fit(ScalarWeight(), ones(100_000))


@pytest.mark.timeout(600)  # thirty processes that train
@pytest.mark.parametrize("loop", [train_until_killed, save_over_and_over])
def test_after_a_kill_at_any_moment_the_newest_checkpoint_loads(loop: Any, tmp_path: Path) -> None:
    kills, rng, folder = (20 if loop is train_until_killed else 10), random.Random(0), tmp_path / "c"
    newest = 0
    for _ in range(kills):
        process = ranks_of_tests._context.Process(target=loop, args=(str(folder),))
        process.start()
        begun = {entry: entry.stat().st_mtime_ns for entry in folder.glob("[!.]*") if entry.is_dir()}
        deadline = time.monotonic() + 60
        # Once it saves, at any moment of its saving.
        while time.monotonic() < deadline and process.is_alive():
            if {entry: entry.stat().st_mtime_ns for entry in folder.glob("[!.]*") if entry.is_dir()} != begun:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = newest_intact([folder])  # a damaged one would be a warning, which is an error here
        assert found is not None
        checkpoint = read_checkpoint(found)
        assert checkpoint.model["w"] == 1 - checkpoint.manifest["step"]
        if loop is train_until_killed:
            assert checkpoint.manifest["step"] >= newest
            newest = checkpoint.manifest["step"]
            assert Path(read_checkpoint(folder / "last").path).is_dir()
    if loop is train_until_killed:
        keep = fit(folder, newest + 2, save_top_k=1, save_last=True, ckpt_path="auto")
        left = {Path(path).name for path in keep.kept} | {"last", f"step-{newest:08d}", "status.json"}
        assert set(os.listdir(folder)) == left, "what dead runs left is removed"


def test_a_checkpoint_that_a_dead_run_was_replacing_is_put_back(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    path, old = tmp_path / "step-00000001", tmp_path / ".step-00000001.old"
    path.rename(old)
    (tmp_path / ".mine.old").mkdir()
    (tmp_path / ".mine.old" / "notes.txt").write_text("mine")
    assert newest_intact([tmp_path]) == path
    assert not old.exists()
    path.rename(old)
    assert read_checkpoint(path).manifest["step"] == 1
    shutil.copytree(path, old)  # killed after the new one took its place
    fit(tmp_path, 2, ckpt_path="auto")
    assert names(tmp_path) == [".mine.old", "step-00000001", "step-00000002"]


# --- disks -----------------------------------------------------------------------------------


def with_small_files(folder: str) -> None:
    import resource

    class Fills(Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.wait_for_checkpoint()
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    keep = ModelCheckpoint(folder)
    trainer = quiet_trainer(
        max_epochs=4, precision=64, enable_checkpointing=True, callbacks=[Fills(), keep], default_root_dir=folder
    )
    try:
        trainer.fit(Regression(), loader(8, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert read_checkpoint(keep.last_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_is_named_and_the_one_before_stays(ranks: int, tmp_path: Path) -> None:
    for error in errors_of_ranks(with_small_files, ranks, str(tmp_path)):
        assert re.search(r"could not be written on rank 0: .*File too large", error)
    (left,) = names(tmp_path)
    assert newest_intact([tmp_path]) == tmp_path / left


def save_as_nobody(folder: str) -> list[str]:
    path = Path(folder)
    fit(path, 1)
    path.chmod(0o555)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*Earlier checkpoints are intact"):
            fit(path, 2, ckpt_path="auto")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        path.chmod(0o755)
    return names(path)


def test_a_read_only_folder_is_named() -> None:
    import tempfile

    place = tempfile.mkdtemp()  # not under tmp_path, which others may not enter
    try:
        os.chmod(place, 0o755)
        assert run_ranks(save_as_nobody, 1, f"{place}/c") == [["step-00000001"]]
    finally:
        shutil.rmtree(place)


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    class Removes(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 2:
                trainer.wait_for_checkpoint()
                shutil.rmtree(tmp_path / "c")

    keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=2, save_last=True, monitor="m")
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1, enable_checkpointing=True, callbacks=[Removes(), keep])

    class Logs(ScalarWeight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("m", float(batch_idx), on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    trainer.fit(Logs(), ones(4))
    assert read_checkpoint(tmp_path / "c" / "last").manifest["step"] == 4


def test_damage_in_any_file_is_named_and_passed_over(tmp_path: Path) -> None:
    first, second = (Path(path) for path in fit(tmp_path, 2).kept)
    assert newest_intact([tmp_path]) == second
    for name in os.listdir(second):
        whole = (second / name).read_bytes()
        middle = whole.index(b"sha256") + 12 if name == "manifest.json" else len(whole) // 2  # in a checksum
        flipped = bytes((*whole[:middle], whole[middle] ^ 1, *whole[middle + 1 :]))
        for damaged in (whole[:middle], b"", None, flipped):
            if damaged is None:
                (second / name).unlink()
            else:
                (second / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=re.escape(name) if flipped is not damaged else "is damaged"):
                read_checkpoint(second)
            assert passing_over(tmp_path) == first
        (second / name).write_bytes(whole)
    assert newest_intact([tmp_path]) == second


def test_any_bit_of_a_manifest_that_flips_is_seen(tmp_path: Path) -> None:
    """Every seventh, and all in the name of its checksum: it is damaged, or, where the text means the same, intact."""
    path = Path(fit(tmp_path, 1).last_path)
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    content = json.loads(whole)
    passed: list[int] = []
    name = 8 * whole.rindex(b'"sha256"')
    for bit in (*range(0, 8 * len(whole), 7), *range(name, name + 64)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        try:
            folders.read_manifest(path)
        except CheckpointError:
            continue
        if json.loads(flipped) != content:
            passed.append(bit)
    assert passed == []


def test_a_manifest_of_another_shape_is_damaged_and_passed_over(tmp_path: Path) -> None:
    first, second = (Path(path) for path in fit(tmp_path, 2).kept)
    content = json.loads((second / "manifest.json").read_text())
    del content["sha256"]
    whole = dict(content["files"])
    wrong: list[dict[str, Any]] = [
        {"created": "2026-13-01T00:00:00"}, {"created": 5}, {"step": "2"}, {"step": 1e999}, {"step": -1}, {"epoch": None},
        {"epoch": True}, {"world_size": 0}, {"world_size": 2}, {"files": 5}, {"files": None}, {"files": []},
        {"files": {**whole, "training.pt": 5}}, {"files": {**whole, "training.pt": {"size": 5}}}, {"more": 1},
        {"files": {name: whole[name] for name in whole if name != "training.pt"}},
    ]  # fmt: skip
    for change in wrong:
        for manifest in (content | change, folders.sealed(content | change)):
            if change == {"more": 1} and "sha256" in manifest:
                continue  # a later version may say more
            (second / "manifest.json").write_text(json.dumps(manifest))
            with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: "):
                folders.verify(second)
            assert passing_over(tmp_path) == first
    (second / "manifest.json").write_text("[" * 100_000)
    assert passing_over(tmp_path) == first
    (second / "manifest.json").write_text(json.dumps(content))
    assert newest_intact([tmp_path]) == second, "earlier versions wrote no checksum of the manifest"


# --- divergence ------------------------------------------------------------------------------


class Diverges(ScalarWeight):
    """Its weight becomes NaN in a given step; the metric it is judged by does not tell."""

    def __init__(self, step: int, score: float = 1.0) -> None:
        super().__init__()
        self.step, self.score = step, score

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", self.score if self.global_step < self.step else float("nan"), on_step=True, on_epoch=False)
        return super().training_step(batch * (float("nan") if self.global_step + 1 == self.step else 1.0), batch_idx)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"save_top_k": 1}, [2, 6]),  # the newest is NaN; the last finite one stays
        ({"save_top_k": 0, "save_last": True}, [2, 6]),
        ({"save_top_k": 0, "save_last": True, "monitor": "score"}, [3, 6]),
    ],
)
def test_the_last_finite_checkpoint_is_never_removed(options: dict[str, Any], left: list[int], tmp_path: Path) -> None:
    more = {"enable_checkpointing": True, "log_every_n_steps": 1, "default_root_dir": tmp_path}
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, **options)
    trainer = quiet_trainer(max_epochs=1, callbacks=[keep], **more)
    trainer.fit(Diverges(3) if "monitor" not in options else NaNScores(3), ones(6))
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]
    finite = [read_checkpoint(tmp_path / name).manifest["finite"] for name in names(tmp_path)]
    assert finite == [step < 3 or "monitor" in options for step in left]
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, **options)
    again = quiet_trainer(max_epochs=2, callbacks=[keep], **more)
    again.fit(Diverges(99), ones(6), ckpt_path=tmp_path / f"step-{left[0]:08d}")
    # Now the newest is finite. The one resumed from is left, and those that the run resumed from knew nothing of.
    assert names(tmp_path) == [f"step-{step:08d}" for step in (*left, 12)]


class NaNScores(Diverges):
    """Its weights stay finite, its metric does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", 1.0 if self.global_step < self.step else float("nan"), on_step=True, on_epoch=False)
        return ScalarWeight.training_step(self, batch, batch_idx)


# --- what is in the files --------------------------------------------------------------------


class Payload:
    """What a pickle can do to whoever loads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "rank-00000.pt"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_crafted_file_with_a_true_checksum_runs_nothing(name: str, form: str, tmp_path: Path) -> None:
    path, victim = Path(fit(tmp_path / "c", 1).last_path), tmp_path / "victim"
    with open(path / name, "wb") as file:
        content = {"seed": 1, "rng": Payload(victim), "state": Payload(victim)}
        (pickle.dump if form == "pickle" else torch.save)(content, file)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = folders.fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(folders.sealed(manifest)))
    with pytest.raises(CheckpointError, match=f"{name} can't be loaded"):
        fit(tmp_path / "d", 2, ckpt_path=path)
    assert not victim.exists()


def test_a_manifest_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    path = Path(fit(tmp_path / "c", 1).last_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"size": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(folders.sealed(manifest)))
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./secret', which is no file of a checkpoint"):
        read_checkpoint(path)


class Tied(Task):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.embed(batch.long())).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_weights_load_in_plain_torch_and_with_the_loaders_of_hugging_face(tmp_path: Path) -> None:
    file = Path(fit(tmp_path / "a", 1, Normalized()).last_path) / "model.safetensors"
    plain = Normalized()
    plain.load_state_dict(safetensors.torch.load_file(file))
    task = Tied()
    file = Path(fit(tmp_path / "b", 1, task).last_path) / "model.safetensors"
    again = Tied()
    assert safetensors.torch.load_model(again, file) == (set(), [])
    assert torch.equal(again.head.weight, task.head.weight)
    assert again.head.weight is again.embed.weight
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"


class Normalized(ScalarWeight):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.BatchNorm1d(3)


@pytest.mark.parametrize("value", [defaultdict(int, a=1), frozenset((1,)), bytearray(b"x")])
def test_what_torch_would_refuse_to_load_is_refused_before_it_is_saved(value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['x'\] is a .*which a checkpoint can't hold"):
        check_plain({"x": value}, "state")


# --- versions --------------------------------------------------------------------------------


def as_format(path: Path, version: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": version}))


def test_other_formats_are_migrated_or_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(fit(tmp_path / "c", 1).last_path)
    as_format(path, 2)
    with pytest.raises(
        CheckpointError, match=r"has format 2, which is newer than this version of Samestep reads \(1\)"
    ):
        read_checkpoint(path)
    as_format(path, 1)

    def doubled(file: str, state: dict[str, Any]) -> dict[str, Any]:
        if file == "model.safetensors":
            return {name: 2 * tensor for name, tensor in state.items()}
        return {**state, "seed": 7} if file == "training.pt" else state

    for module in (folders, migrations):
        monkeypatch.setattr(module, "FORMAT", 3)
    with pytest.raises(CheckpointError, match=r"has format 1, this version of Samestep reads 3: read it with"):
        read_checkpoint(path)
    monkeypatch.setattr(migrations, "MIGRATIONS", {1: doubled, 2: doubled})
    monkeypatch.setattr(folders, "MIGRATIONS", migrations.MIGRATIONS)
    checkpoint = read_checkpoint(path)
    assert checkpoint.model["w"] == 4 * (1 - 1)
    assert checkpoint.training["seed"] == 7


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_time_interval": 5}, r"train_time_interval=5\): expected a timedelta, such as timedelta\(minutes=30\) or None"),
        ({"save_top_k": 1.5}, r"save_top_k=1\.5\): expected a whole number"),
        ({"save_top_k": True}, r"save_top_k=True\): expected a whole number"),
        ({"save_last": "yes"}, r"save_last='yes'\): expected True or False or None"),
        ({"every_n_train_steps": 2.0}, r"every_n_train_steps=2\.0\): expected a whole number or None"),
        ({"asynchronous": 1}, r"asynchronous=1\): expected True or False"),
        ({"monitor": 3}, r"monitor=3\): expected a string or None"),
        ({"dirpath": 3}, r"dirpath=3\): expected a path"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ModelCheckpoint(**options)
    ModelCheckpoint(train_time_interval=timedelta(seconds=1), save_top_k=1, save_last=True)
