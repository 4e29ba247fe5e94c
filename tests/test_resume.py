"""A run that is resumed is the run that was never stopped, bit by bit."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from samestep.trainer import CheckpointError, Task
from samestep.trainer.checkpoint import Checkpoint
from tasks import Regression, loader, parameters_of, quiet_trainer
from torch import nn


class Noisy(Task):
    """Everything that has a state: dropout, BatchNorm, momentum, a schedule by steps and one by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x + 0.1 * torch.randn_like(x)).squeeze(1), y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x).squeeze(1), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=30)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": warm, "interval": "step"}, {"scheduler": plateau, "monitor": "val"}]


class Trace(Callback):
    """The samples, learning rates and hooks of a run, by epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch))

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.global_step, batch_idx, rate, tuple(batch[1].tolist())))

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(("val", trainer.callback_metrics["val"].item()))


def run(folder: str, epochs: int, ckpt_path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    options = {"precision": 64, "seed": 3, "accumulate_grad_batches": 2, **options}
    trace = Trace()
    workers = options.pop("workers", 0)
    keep = ModelCheckpoint(folder, save_top_k=-1, **options.pop("checkpoint", {}))
    stopping = EarlyStopping("val", patience=100)
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[keep, trace, stopping], enable_checkpointing=True, **options)
    task = Noisy()
    training = loader(46, 4, shuffle=True, num_workers=workers, persistent_workers=bool(workers))
    trainer.fit(task, training, loader(11, 4), ckpt_path=ckpt_path)
    return {
        "parameters": parameters_of(task),
        "buffers": torch.cat([buffer.double().reshape(-1) for buffer in task.buffers()]),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "early stopping": stopping.state_dict(),
        "progress": trainer.progress.state_dict(),
        "rng": torch.get_rng_state(),
        "trace": trace.seen,
        "paths": list(keep.kept),
    }


def assert_same(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    trace = whole["trace"][-len(resumed["trace"]) :]
    assert resumed["trace"] == trace
    for name in ("parameters", "buffers", "rng"):
        assert torch.equal(resumed[name], whole[name]), name
    assert str(resumed["optimizer"]) == str(whole["optimizer"])
    for name in ("schedulers", "early stopping", "progress"):
        assert resumed[name] == whole[name], name


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (2, {"workers": 1}), (1, {"seed": None}), (2, {"seed": None})]
)
def test_resuming_after_any_epoch_equals_going_on(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(11)  # what a run without a seed begins with
    whole = run_ranks(run, ranks, str(tmp_path / "whole"), 4, None, options)
    for stop in (1, 3) if not options else (2,):
        path = whole[0]["paths"][stop - 1]
        resumed = run_ranks(run, ranks, str(tmp_path / f"resumed-{stop}"), 4, path, options)
        for rank in range(ranks):
            assert_same(resumed[rank], whole[rank])
            assert next(entry for entry in resumed[rank]["trace"] if entry[0] == "epoch") == ("epoch", stop)


def test_a_resumed_run_keeps_no_copy_of_the_checkpoint_while_it_trains(tmp_path: Path) -> None:
    class Looks(Callback):
        kept: list[Any] | None = None

        def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
            gc.collect()
            self.kept = [each for each in gc.get_objects() if type(each) is Checkpoint]

    keep, looks = ModelCheckpoint(tmp_path / "c"), Looks()
    first = quiet_trainer(max_epochs=1, precision=64, enable_checkpointing=True, callbacks=[keep])
    first.fit(Noisy(), loader(8, 4), loader(8, 4))
    trainer = quiet_trainer(max_epochs=2, precision=64, callbacks=[looks])
    trainer.fit(Noisy(), loader(8, 4), loader(8, 4), ckpt_path=keep.best_model_path)
    assert trainer.global_step == 4
    assert looks.kept == []


def test_resuming_twice_equals_going_on(tmp_path: Path) -> None:
    whole = run(str(tmp_path / "whole"), 3, None, {})
    first = run(str(tmp_path / "parts"), 1, None, {})
    second = run(str(tmp_path / "parts"), 2, first["paths"][-1], {})
    third = run(str(tmp_path / "parts"), 3, second["paths"][-1], {})
    assert_same(third, whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_inside_an_epoch_sees_each_sample_once(ranks: int, tmp_path: Path) -> None:
    options = {"checkpoint": {"every_n_train_steps": 1}}
    whole = run_ranks(run, ranks, str(tmp_path / "whole"), 2, None, options)
    for path in whole[0]["paths"][1:-1:4]:
        resumed = run_ranks(run, ranks, str(tmp_path / Path(path).name), 2, path, options)
        for rank in range(ranks):
            assert torch.equal(resumed[rank]["parameters"], whole[rank]["parameters"]), path
            batches = [entry for entry in resumed[rank]["trace"] if len(entry) == 4]
            expected = [entry for entry in whole[rank]["trace"] if len(entry) == 4]
            assert batches == expected[len(expected) - len(batches) :]


def test_auto_takes_the_newest_intact_checkpoint_or_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = run(str(tmp_path / "a"), 2, "auto", {})
    assert len(started["paths"]) == 2
    newest = Path(started["paths"][-1])
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    resumed = run(str(tmp_path / "a"), 3, "auto", {})
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "passed over" in line)
    assert line.startswith(f"samestep: passed over: {weights} is damaged: its checksum differs.")
    assert resumed["trace"][0] == ("epoch", 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*Beside it are"):
        run(str(tmp_path / "b"), 3, str(newest), {})


def test_another_number_of_ranks_goes_on_with_the_batch_of_all(tmp_path: Path) -> None:
    two = run_ranks(run, 2, str(tmp_path / "two"), 1, None, {"checkpoint": {"every_n_train_steps": 1}})[0]
    inside, boundary = two["paths"][0], two["paths"][-1]
    for path in (inside, boundary):
        resumed = run(str(tmp_path / Path(path).name), 2, path, {})
        assert resumed["progress"]["epoch"] == 2
        assert {len(entry[3]) for entry in resumed["trace"] if len(entry) == 4} == {
            8,
            6,
        }  # 2 × 4, and what is left of 46


def test_what_can_not_be_resumed_is_refused(tmp_path: Path) -> None:
    path = run(str(tmp_path / "a"), 1, None, {})["paths"][0]
    with pytest.raises(CheckpointError, match=r"seed=3.*seed=4"):
        run(str(tmp_path / "b"), 2, path, {"seed": 4})
    with pytest.raises(CheckpointError, match=r"no such folder.*Beside it are: step"):
        run(str(tmp_path / "b"), 2, path + "0", {})
    with pytest.raises(CheckpointError, match="does not fit Regression"):
        quiet_trainer(precision=64).fit(Regression(), loader(8, 4), ckpt_path=path)
    file = tmp_path / "lightning.ckpt"
    torch.save({"state_dict": {}}, file)
    with pytest.raises(CheckpointError, match="is a file"):
        quiet_trainer().fit(Regression(), loader(8, 4), ckpt_path=file)


def test_a_checkpoint_loads_in_plain_torch_and_runs_no_code(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = Path(run(str(tmp_path / "a"), 1, None, {})["paths"][0])
    task = Noisy().double()
    task.load_state_dict(load_file(path / "model.safetensors"))

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    for name in ("training.pt", "rank-00000.pt"):
        torch.save({"seed": 3, "rng": Evil(), "x": Evil()}, path / name)
    from samestep.trainer.checkpoint import folder

    manifest = path / "manifest.json"
    import json

    content = json.loads(manifest.read_text())
    content["files"] = {name: folder.fingerprint(path / name) for name in content["files"]}
    manifest.write_text(json.dumps(folder.sealed(content)))
    with pytest.raises(CheckpointError, match=r"training\.pt can't be loaded without running code"):
        run(str(tmp_path / "b"), 2, str(path), {})
    assert not (tmp_path / "evil").exists()
