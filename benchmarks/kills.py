"""Kill a rank at a random moment, start all of them again, and so on: does the run end where the undisturbed one ends?

    python benchmarks/kills.py --kills 200

Two ranks train a small model with dropout, momentum and a schedule, and save every few steps. At a random moment one of
them, or both, gets SIGKILL; the one that is left must end by itself. (Not before they have met: a rank waits for minutes for
one that may still be starting, and it would be torchrun's agent that ends it.) The next attempt goes on from the newest
checkpoint.
After each kill the newest checkpoint that was complete before must still verify, or a newer one must. When a run is through,
its weights are compared bit by bit with those of a run that nobody disturbed; then the next run begins, with another seed.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from samestep.callbacks import Callback, ModelCheckpoint
from samestep.trainer import Task, Trainer
from samestep.trainer.checkpoint import newest_intact, read_checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 6, 480, 4, 5
RANKS = 2


class Small(Task):
    """Two layers with dropout between them, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * SAMPLES // (RANKS * BATCH))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Met(Callback):
    """Leaves a file when the ranks have met."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self.file.touch()


def rank_of_run(rank: int, port: int, folder: str, seed: int) -> None:
    """One rank: train to the end from the newest checkpoint, or from the start."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", max_epochs=EPOCHS, seed=seed, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=SAVE_EVERY), ModelCheckpoint(f"{folder}/end"), Met(met(folder, rank))],
    )  # fmt: skip
    trainer.fit(Small(), loader, ckpt_path="auto")


def met(folder: str | Path, rank: int) -> Path:
    """The file that tells that a rank has met the others."""
    return Path(f"{folder}-rank-{rank}.met")


def start(folder: Path, seed: int) -> list[Any]:
    """The processes of one attempt; what they say goes into a file."""
    for rank in range(RANKS):
        met(folder, rank).unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["samestep.trainer", "samestep.callbacks", "torch._dynamo"])
    processes = [context.Process(target=quiet, args=(rank, port, str(folder), seed)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    return processes


def quiet(rank: int, port: int, folder: str, seed: int) -> None:
    """A rank whose output goes into a file of its own."""
    with open(f"{folder}-rank-{rank}.log", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        rank_of_run(rank, port, folder, seed)


def wait(processes: list[Any], seconds: float) -> float:
    """Wait until all have ended; return how long it took. Those that don't end in time are killed, which is an error."""
    begin = time.monotonic()
    for process in processes:
        process.join(max(0.0, begin + seconds - time.monotonic()))
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()
        process.join()
    if left:
        raise RuntimeError(f"{len(left)} ranks did not end within {seconds} s")
    return time.monotonic() - begin


def through(processes: list[Any]) -> None:
    """Wait for an attempt that nobody disturbs."""
    wait(processes, 300)
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"ranks failed, exit status {codes}")


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Those at the end of a run."""
    newest = newest_intact([folder / "checkpoints", folder / "end"])
    assert newest is not None
    checkpoint = read_checkpoint(newest)
    assert checkpoint.training["global_step"] == EPOCHS * SAMPLES // (RANKS * BATCH), newest
    return checkpoint.model


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint that verifies; 0: there is none."""
    newest = newest_intact([folder / "checkpoints", folder / "end"])
    return 0 if newest is None else int(newest.name.removeprefix("step-"))  # a run that goes on may remove it meanwhile


def main() -> int:
    """Kill and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest", type=float, default=4.0, help="seconds that ranks that have met may have before a kill"
    )
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    kills, runs, ends, lost = 0, 0, list[float](), 0
    try:
        while kills < arguments.kills:
            seed = arguments.seed + runs
            undisturbed, folder = root / f"{seed}-undisturbed", root / f"{seed}-killed"
            through(start(undisturbed, seed))
            processes = start(folder, seed)
            while kills < arguments.kills:
                while not all(met(folder, rank).exists() or not processes[rank].is_alive() for rank in range(RANKS)):
                    time.sleep(0.01)
                time.sleep(chance.uniform(0.0, arguments.longest))
                before = newest_step(folder)
                if not any(process.is_alive() for process in processes):
                    break
                victims = chance.choice([processes[:1], processes[1:], processes])
                for process in victims:
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGKILL)
                ends.append(wait(processes, 60))
                kills += 1
                if newest_step(folder) < before:
                    lost += 1
                    print(f"kill {kills}: the checkpoint of step {before} is gone", flush=True)
                processes = start(folder, seed)
            through(processes)
            ours, theirs = weights_of(folder), weights_of(undisturbed)
            same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
            runs += 1
            print(f"run {runs}: {kills} kills so far, weights {'equal bit by bit' if same else 'DIFFER'}", flush=True)
            if not same:
                raise RuntimeError(f"{folder} is not as {undisturbed}")
            shutil.rmtree(undisturbed)
            shutil.rmtree(folder)
    finally:
        if sys.exc_info()[0] is None:
            shutil.rmtree(root)
        else:
            print(f"what the ranks said: {root}", file=sys.stderr)
    print(f"{kills} kills in {runs} runs, {lost} checkpoints lost")
    print(f"ranks gone after a kill: median {statistics.median(ends):.2f} s, at most {max(ends):.2f} s")
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main())
