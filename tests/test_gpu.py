"""What needs CUDA; `make test-gpu`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.strategies import DDPStrategy
from tasks import Regression, loader, numbers, parameters_of, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[1] / "examples"


def train(accelerator: str, strategy: str | DDPStrategy, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    task = Regression()
    trainer = quiet_trainer(
        accelerator=accelerator, devices=1, strategy=strategy, precision=64, max_epochs=3, seed=2,
        accumulate_grad_batches=2, gradient_clip_val=0.5, **options,
    )  # fmt: skip
    trainer.fit(task, loader(40, 4, shuffle=True), loader(9, 4))
    assert task.device.type == ("cuda" if accelerator == "gpu" else "cpu")
    return parameters_of(task).cpu()


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_one_gpu_trains_what_the_cpu_trains(strategy: str) -> None:
    torch.testing.assert_close(train("gpu", strategy), train("cpu", "single_device"), rtol=0, atol=1e-9)


class NoSyncs(Callback):
    """Lets torch raise on any wait for the device, from the start of an ordinary step to its end."""

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        ordinary = batch_idx > 2 and (trainer.global_step + 1) % trainer.config.log_every_n_steps != 0
        torch.cuda.set_sync_debug_mode("error" if ordinary else "default")

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_an_ordinary_step_never_waits_for_the_device(strategy: str) -> None:
    class Pinned(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    trainer = quiet_trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=64, max_epochs=2, log_every_n_steps=5,
        gradient_clip_val=1.0, enable_progress_bar=True, callbacks=[NoSyncs()],
    )  # fmt: skip
    trainer.fit(Pinned(), loader(80, 4, pin_memory=True))


def test_a_checkpoint_from_the_gpu_loads_on_the_cpu_and_resumes(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    options: dict[str, Any] = {
        "accelerator": "gpu",
        "devices": 1,
        "precision": 64,
        "seed": 2,
        "enable_checkpointing": True,
    }
    whole = Regression()
    trainer = quiet_trainer(max_epochs=2, callbacks=[keep], **options)
    trainer.fit(whole, loader(40, 4, shuffle=True))
    first = next(iter(keep.kept))
    assert Regression.load_from_checkpoint(first).device.type == "cpu"
    resumed = Regression()
    again = ModelCheckpoint(tmp_path / "again")
    quiet_trainer(max_epochs=2, callbacks=[again], **options).fit(resumed, loader(40, 4, shuffle=True), ckpt_path=first)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.parametrize(
    ("lever", "tolerance"),
    [
        ({"comm_hook": "fp16"}, 1e-2),
        ({"comm_hook": "bf16"}, 1e-1),
        ({"comm_hook": "quantize8"}, 1e-1),
        ({"comm_hook": "powersgd"}, 1e-1),
        ({"comm_hook": "hierarchical"}, 1e-9),
        ({"compile": "before_ddp", "compile_options": {"backend": "aot_eager"}}, 1e-9),
        ({"compile": "after_ddp", "compile_options": {"backend": "aot_eager"}}, 1e-9),
        ({"static_graph": True}, 1e-9),
        ({"batched_grad_copy": True}, 1e-9),
        ({"uneven_inputs": "join"}, 1e-9),
    ],
)
def test_the_levers_of_ddp_on_nccl(lever: dict[str, Any], tolerance: float) -> None:
    trained = train("gpu", DDPStrategy(**lever))
    torch.testing.assert_close(trained, train("cpu", "single_device"), rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_every_precision_trains(precision: str, strategy: str) -> None:
    task = Regression()
    data = TensorDataset(*(part.float() for part in numbers(64).tensors))
    trainer = quiet_trainer(accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=2)
    trainer.fit(task, DataLoader(data, 4))
    assert parameters_of(task).isfinite().all()
    assert trainer.global_step > 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_batchnorm_over_all_ranks_and_updates_inside_the_backward(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = run_ranks(normalized, ranks, port, join_group=False)
    for result in results[1:]:
        assert torch.equal(result, results[0])


def normalized(port: int) -> torch.Tensor:
    torch.manual_seed(0)
    task = Regression()
    task.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    strategy = DDPStrategy(sync_batchnorm=True, optimizer_in_backward=True)
    trainer = quiet_trainer(accelerator="gpu", strategy=strategy, precision=64, max_epochs=2)
    trainer.fit(task, loader(40, 4))
    return parameters_of(task).cpu()


class Overlapping(Regression):
    """Keeps the device busy before it reads the batch, so that a copy that is not waited for would be seen."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.randn(2000, 2000, device=self.device)
        for _ in range(5):
            x = x @ x / 100
        return self.loss([part + 0 * x[0, 0].nan_to_num(0, 0, 0) for part in batch])


def trained_from_workers(**options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    task = Overlapping()
    trainer = quiet_trainer(accelerator="gpu", devices=1, strategy="single_device", precision=64, max_epochs=2, seed=2)
    trainer.fit(task, loader(4000, 100, shuffle=True, num_workers=2, **options))
    return parameters_of(task).cpu()


def test_batches_that_are_copied_ahead_are_those_that_are_not() -> None:
    """Copied ahead from workers with pinned memory; the memory of a batch is used again by the next but one."""
    ahead, in_line = trained_from_workers(pin_memory=True), trained_from_workers()
    torch.testing.assert_close(ahead, in_line, rtol=0, atol=1e-9)


def test_digits_on_all_gpus() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py"), "trainer.accelerator=gpu"],
        env=dict(os.environ), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("val/acc"))
    assert accuracy >= 0.98
