"""What an ordinary step costs beyond the raw loop's: Python calls, frames, collectives, device syncs.

A step is ordinary when nothing is due in it: no log, no validation, no save, no control word.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import samestep.callbacks
import samestep.strategies
import samestep.trainer
import torch
from run_ranks import run_ranks
from samestep.callbacks import Callback, LearningRateMonitor
from samestep.trainer import Task
from tasks import Regression, loader, quiet_trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 45  # fewer than log_every_n_steps
FIRST = 5  # before it, lazy imports, and DDP rebuilding its buckets
PACKAGES = (samestep.trainer, samestep.callbacks, samestep.strategies)
TORCH = str(Path(torch.__file__).parent)
FOLDERS = tuple(str(Path(str(package.__file__)).parent) + "/" for package in PACKAGES)

# What makes the CPU wait for a GPU, as a method or function called from Python …
SYNCING_FUNCTIONS = {
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__format__", "__repr__", "__contains__", "nonzero", "equal", "allclose", "is_nonzero", "masked_select", "unique",
}  # fmt: skip
# … and as an operation that another one ends in.
SYNCING_OPERATIONS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.equal", "aten.masked_select"}


# --- counting ------------------------------------------------------------------------------


@dataclass
class Step:
    """What happened in one step. Where two counters see the same thing (`item`), both count it."""

    calls: Counter[str] = field(default_factory=Counter[str])
    """Python calls of ours, by file and function."""
    communications: Counter[str] = field(default_factory=Counter[str])
    """Collectives that reached torch.distributed, whoever started them, DDP's reducer included."""
    collectives: Counter[str] = field(default_factory=Counter[str])
    """Collectives of ours, by name."""
    syncs: Counter[str] = field(default_factory=Counter[str])
    """Operations for which the CPU would wait, were the tensors on a GPU."""


class Operations(TorchDispatchMode):
    def __init__(self, now: Step) -> None:
        super().__init__()
        self.now = now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name.startswith("c10d."):
            self.now.communications[name] += 1
        elif name in SYNCING_OPERATIONS:
            self.now.syncs[name] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self, now: Step) -> None:
        super().__init__()
        self.now = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in SYNCING_FUNCTIONS or (name == "to" and self._goes_to_cpu(*args[1:], *kwargs.values())):
            self.now.syncs[name] += 1
        return func(*args, **kwargs)

    @staticmethod
    def _goes_to_cpu(*arguments: Any) -> bool:
        # torch's own functions, such as clip_grad_norm_, bring tensors to the device they are on.
        from_torch = sys._getframe(2).f_code.co_filename.startswith(TORCH)
        return not from_torch and any(str(argument) == "cpu" for argument in arguments)


class Counting:
    """Counts from one `note` to the next, as a context manager."""

    def __init__(self, ours: Counter[str], *, calls: bool) -> None:
        self.ours, self.before = ours, Counter[str]()
        self.now, self.steps = Step(), list[Step]()
        # Calls are counted without the modes: torch calls those in Python.
        self.modes = [] if calls else [Functions(self.now), Operations(self.now)]

    def note(self) -> None:
        """End a step."""
        now = self.now
        step = Step(Counter(now.calls), Counter(now.communications), self.ours - self.before, Counter(now.syncs))
        self.steps.append(step)
        self.before = Counter(self.ours)
        for counter in (now.calls, now.communications, now.syncs):
            counter.clear()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            self.now.calls[f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"] += 1

    def __enter__(self) -> Counting:
        for mode in self.modes:
            mode.__enter__()
        if not self.modes:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        for mode in reversed(self.modes):
            mode.__exit__(None, None, None)


def ordinary(steps: list[Step]) -> list[Step]:
    """Without the first, and without those in which a control word was started or read."""
    words = [bool(step.collectives["control word"]) for step in steps]
    # The word started in one step is read in the next.
    kept = [step for i, step in enumerate(steps) if i >= FIRST and not words[i] and not words[i - 1]]
    assert len(kept) >= 15, f"only {len(kept)} ordinary steps of {len(steps)}"
    return kept


# --- what is counted -----------------------------------------------------------------------


class Bare(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Logs(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, prog_bar=True)
        return loss


class LogsBoth(Bare):
    """Logs for the step and for the epoch, clips, and moves the learning rate in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer_of(mode: str, folder: str) -> Any:
    if mode == "bare":
        return quiet_trainer(max_epochs=1)
    options: dict[str, Any] = {"gradient_clip_val": 1.0} if mode == "everything" else {}
    return quiet_trainer(
        max_epochs=1,
        default_root_dir=folder,
        logger=True,
        enable_progress_bar=True,
        enable_checkpointing=True,
        callbacks=[LearningRateMonitor()],
        **options,
    )


TASKS: dict[str, type[Task]] = {"bare": Bare, "typical": Logs, "everything": LogsBoth}


def batches() -> list[Any]:
    x = torch.randn(4, 6)
    return [(x, x.sum(1))] * STEPS


def steps_of(mode: str, folder: str, calls: bool, kind: type[Task] | None = None, batch_size: int = 0) -> list[Step]:
    """The ordinary steps of a fit, each counted from one call of `training_step` to the next.

    With a `batch_size`, the batches come from a DataLoader.
    """
    trainer = trainer_of(mode, folder)
    counting = Counting(getattr(trainer.strategy, "collectives", Counter[str]()), calls=calls)

    class Noting(kind or TASKS[mode]):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            counting.note()
            return super().training_step(batch, batch_idx)

    samples = STEPS * batch_size * trainer.world_size
    data = loader(samples, batch_size, shuffle=True) if batch_size else batches()
    with counting:
        trainer.fit(Noting().double() if batch_size else Noting(), data)
    assert trainer.global_step == STEPS
    return ordinary(counting.steps)


def raw_steps() -> list[Step]:
    """The same training by hand, under DDP."""
    counting = Counting(Counter[str](), calls=False)
    model = nn.parallel.DistributedDataParallel(Bare().net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with counting:
        for x, y in batches():
            counting.note()
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ordinary(counting.steps)


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    return [function(*args)] if ranks == 1 else run_ranks(function, ranks, *args)


# --- Python calls --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("mode", "most"), [("bare", 30), ("typical", 60), ("everything", 60)])
def test_python_calls_of_a_step(mode: str, most: int, ranks: int, tmp_path: Path) -> None:
    for steps in on_ranks(steps_of, ranks, mode, str(tmp_path), True):
        for step in steps:
            listing = "\n".join(f"{count:3}  {name}" for name, count in step.calls.most_common())
            assert step.calls["loop.py: train_step"] == 1
            assert step.calls.total() <= most, f"{step.calls.total()} calls, expected at most {most}:\n{listing}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_dealing_out_samples_takes_no_call_for_each_of_them(ranks: int, tmp_path: Path) -> None:
    few, many = (
        {
            step.calls.total()
            for steps in on_ranks(steps_of, ranks, "bare", str(tmp_path), True, None, size)
            for step in steps
        }
        for size in (2, 32)
    )
    assert few == many


def names_of_hooks_called(mode: str, folder: str) -> set[str]:
    """The empty methods of the base classes that a fit with validation calls."""
    called: set[str] = set()
    files = {inspect.getfile(Callback), inspect.getfile(Task)}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files and frame.f_code.co_name.startswith("on_"):
            called.add(frame.f_code.co_name)

    trainer = trainer_of(mode, folder)
    sys.setprofile(profile)
    try:
        trainer.fit(Regression(), batches(), batches())
    finally:
        sys.setprofile(None)
    return called


# These two are called: the first one's default does something, and a checkpoint asks everybody for what to keep.
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("bare", {"on_validation_model_eval"}), ("typical", {"on_validation_model_eval", "on_save_checkpoint"})],
)
def test_a_hook_that_nobody_overrides_is_never_called(mode: str, expected: set[str], tmp_path: Path) -> None:
    assert names_of_hooks_called(mode, str(tmp_path)) == expected


# --- frames --------------------------------------------------------------------------------


def frames_to_backward(mode: str, folder: str) -> list[list[str]]:
    """For each backward, the functions between the caller of fit and `Tensor.backward`, the outermost first."""
    here = sys._getframe()
    stacks: list[list[str]] = []

    def walk(_: Tensor) -> None:
        frame: FrameType | None = sys._getframe(1)
        names: list[str] = []
        while frame is not None and frame is not here:
            names.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")
            frame = frame.f_back
        assert frame is here, "the backward ran in another thread"
        stacks.append(names[names.index("_tensor.py: backward") + 1 :][::-1])

    class Hooked(TASKS[mode]):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(walk)
            return loss

    trainer_of(mode, folder).fit(Hooked(), batches())
    assert len(stacks) == STEPS
    return stacks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["bare", "everything"])
def test_frames_between_fit_and_backward(mode: str, ranks: int, tmp_path: Path) -> None:
    for stacks in on_ranks(frames_to_backward, ranks, mode, str(tmp_path)):
        for stack in stacks:
            assert len(stack) <= 4, stack
            assert stack[0] == "trainer.py: fit"


# --- collectives and syncs -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bare", "typical", "everything"])
def test_a_step_communicates_as_the_raw_loop_does(mode: str, tmp_path: Path) -> None:
    expected = run_ranks(raw_steps, 2)[0][0].communications
    assert expected == {"c10d.allreduce_": 1}
    for steps in run_ranks(steps_of, 2, mode, str(tmp_path), False):
        for step in steps:
            assert step.communications == expected
            assert step.collectives == {}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["bare", "typical", "everything"])
def test_a_step_never_waits_for_the_device(mode: str, ranks: int, tmp_path: Path) -> None:
    for steps in on_ranks(steps_of, ranks, mode, str(tmp_path), False):
        for step in steps:
            assert step.syncs == {}


# --- the counters themselves ---------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(), "tolist": lambda t: t.tolist(), "cpu": lambda t: t.cpu(), "to": lambda t: t.to("cpu"),
    "numpy": lambda t: t.numpy(), "__float__": float, "__int__": int, "__bool__": bool,
    "__format__": lambda t: f"{t:.3f}", "equal": lambda t: torch.equal(t, t), "nonzero": lambda t: t.nonzero(),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_the_counters_see_a_sync(name: str, tmp_path: Path) -> None:
    class Reads(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            READS[name](loss.detach())
            return loss

    assert all(step.syncs[name] == 1 for step in steps_of("bare", str(tmp_path), False, Reads))


class Communicates(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.all_reduce(torch.ones(()), name="of the test")
        torch.distributed.broadcast(torch.ones(()), 0)
        return super().training_step(batch, batch_idx)


def test_the_counters_see_a_collective(tmp_path: Path) -> None:
    for steps in run_ranks(steps_of, 2, "bare", str(tmp_path), False, Communicates):
        for step in steps:
            assert step.collectives == {"of the test": 1}
            assert step.communications == {"c10d.allreduce_": 2, "c10d.broadcast_": 1}


def test_the_counters_see_a_call(tmp_path: Path) -> None:
    class Asks(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _ = self.trainer.global_step, self.trainer.global_step
            return super().training_step(batch, batch_idx)

    plain, asking = steps_of("bare", str(tmp_path), True), steps_of("bare", str(tmp_path), True, Asks)
    assert asking[0].calls - plain[0].calls == {"trainer.py: global_step": 2, "task.py: trainer": 2}
