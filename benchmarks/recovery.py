"""From a killed rank to training again, split into its parts, under the same torchrun for each trainer.

    python benchmarks/recovery.py --impls samestep,lightning --rounds 5

Two ranks train; rank 1 ends itself with SIGKILL behind a step; torchrun starts both again, and the run goes on from its
newest checkpoint. Every process notes when it was where:

    detect    until torch's agent begins to end the other rank
    relaunch  until that has ended and the first line of the program runs again
    import    until torch and the trainer are imported
    load      until the checkpoint is loaded and training begins
    step      until the first step is done

Lightning meets again in the rendezvous store of its first attempt, where it may find the dead ranks' addresses; it is
therefore run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which its users have to know. Samestep runs without.
"""

from __future__ import annotations

import time

BEGIN = time.time()  # before anything is imported that takes time

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from datetime import datetime  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

IMPLEMENTATIONS = ("samestep", "lightning")
PARTS = ("detect", "relaunch", "import", "load", "step")
SAVE_EVERY, KILL_AT, LAST = 20, 50, 60


def note(folder: str, event: str, at: float | None = None) -> None:
    """Append one line to the notes of the run: other ranks do, too."""
    line = {"event": event, "at": at or time.time(), "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    with open(Path(folder) / "notes.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def train(implementation: str, folder: str, width: int) -> None:
    """The program of one rank."""
    note(folder, "begin", BEGIN)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    if implementation == "samestep":
        from samestep.callbacks import Callback, ModelCheckpoint
        from samestep.trainer import Task as Base
        from samestep.trainer import Trainer
    else:
        from lightning.pytorch import Callback, Trainer  # pyright: ignore
        from lightning.pytorch import LightningModule as Base  # pyright: ignore
        from lightning.pytorch.callbacks import ModelCheckpoint  # pyright: ignore
    note(folder, "imported")

    class Model(Base):  # pyright: ignore
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Notes(Callback):  # pyright: ignore
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            note(folder, "loaded")
            self.first = True

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self.first:
                note(folder, "stepped")
                self.first = False
            killed = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
            if trainer.global_step == KILL_AT and trainer.global_rank == 1 and not killed:
                note(folder, "kill")
                os.kill(os.getpid(), signal.SIGKILL)

    saves = ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True)
    options: dict[str, Any] = {} if implementation == "samestep" else {"enable_model_summary": False}
    trainer: Any = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=LAST, logger=False, enable_progress_bar=False,
        default_root_dir=folder, callbacks=[saves, Notes()], **options,
    )  # fmt: skip
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(16 * 2 * LAST, 64)), 16)
    last = Path(folder) / "checkpoints" / "last.ckpt"
    resume = "auto" if implementation == "samestep" else (str(last) if last.exists() else None)
    trainer.fit(Model(), loader, ckpt_path=resume)


def measure(implementation: str, width: int) -> dict[str, float] | None:
    """Seconds of each part in one run; None: the run did not come back."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
            __file__, "--worker", implementation, "--folder", folder, "--width", str(width),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if implementation == "lightning":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        except subprocess.TimeoutExpired:
            return None
        if result.returncode:
            print(result.stderr[-2000:], file=sys.stderr)
            return None
        notes = [json.loads(line) for line in (Path(folder) / "notes.jsonl").read_text("utf-8").splitlines()]

    def last(event: str, attempt: int) -> float:
        return max((each["at"] for each in notes if (each["event"], each["attempt"]) == (event, attempt)), default=0.0)

    kill = last("kill", 0)
    moments = [
        kill,
        _detected(result.stderr, kill),
        *(last(event, 1) for event in ("begin", "imported", "loaded", "stepped")),
    ]
    return dict(zip(PARTS, (until - since for since, until in pairwise(moments)), strict=True))


def _detected(log: str, kill: float) -> float:
    """When the agent wrote that it ends a rank: `W0131 23:59:59.123456 … Sending process 42 closing signal SIGTERM`."""
    line = re.search(r"(\d\d):(\d\d):(\d\d\.\d+).*closing signal", log)
    if line is None:
        return kill
    hours, minutes, seconds = line.groups()
    of_day = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    midnight = datetime.fromtimestamp(kill).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    return midnight + of_day


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--impls", default="samestep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512, help="of the model: 512 is 1.2 MB, 3600 is 53 MB of weights")
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker, arguments.folder, arguments.width)
        return 0
    wanted = [name for name in arguments.impls.split(",") if importlib.util.find_spec(name) is not None]
    rounds: dict[str, list[dict[str, float] | None]] = {name: [] for name in wanted}
    for _ in range(arguments.rounds):
        for name in wanted:
            rounds[name].append(measure(name, arguments.width))
    print(f"seconds from SIGKILL of a rank, median of {arguments.rounds} rounds [least, greatest of all]")
    print(f"{'':10}" + "".join(f"{part:>10}" for part in PARTS) + "       all")
    for name, results in rounds.items():
        good = [result for result in results if result is not None]
        if good:
            totals = [sum(result.values()) for result in good]
            cells = "".join(f"{statistics.median(result[part] for result in good):10.2f}" for part in PARTS)
            print(f"{name:10}{cells}  {statistics.median(totals):8.2f} [{min(totals):.2f}, {max(totals):.2f}]")
        if len(good) < len(results):
            print(f"{name:10}{len(results) - len(good)} of {len(results)} runs did not come back")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
