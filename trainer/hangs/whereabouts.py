"""Where a thread is, in words, read from its Python stack by another thread: the steps themselves note nothing."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / folder}/" for folder in ("trainer", "callbacks", "strategies"))
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_LIBRARIES = (*_OURS, _TORCH, f"{Path(linecache.__file__).parent}/", "<")
_DISTRIBUTED = (f"{_TORCH}distributed/", f"{_TORCH}nn/parallel/distributed.py")
_COMPILERS = (f"{_TORCH}_dynamo/", f"{_TORCH}_inductor/", f"{_TORCH}_functorch/")
_DATA = (f"{_TORCH}utils/data/", f"{_OURS[0]}data/")
# Frames of one library in a row that are folded in a printed stack, from this many on.
_FOLDED = 3

LOADER = "the data loader"
# Hooks that may take minutes: before training, and behind it, where rank 0 exports or uploads while the others have ended.
_LONG = ("prepare_data", "on_train_end", "on_fit_end", "teardown")


@dataclass(frozen=True)
class Whereabouts:
    """Where a thread is."""

    phase: str
    """What it does, in words: "training_step", "the data loader", "the backward", …"""
    waits: str
    """The collective in which it waits for other ranks; empty: it is elsewhere."""
    place: str
    """File and line of the user's code, as "train.py:88"; empty: there is none on the stack."""
    takes_long: bool
    """Whether it is something that may take minutes: preparing data, compiling, writing a checkpoint."""

    @property
    def where(self) -> str:
        """Phase and place."""
        return f"{self.phase} ({self.place})" if self.place else self.phase


def whereabouts(frame: FrameType, *, idle: bool) -> Whereabouts:
    """Read a stack.

    Args:
        frame: the innermost of the thread.
        idle: the thread takes no processor time. In the backward, that is how it waits for DDP's reduction.
    """
    frames = list(_outwards(frame))
    files = [each.f_code.co_filename for each in frames]
    place = next((_place(each) for each in frames if _is_users(each)), "")
    ours = next((index for index, file in enumerate(files) if file.startswith(_OURS)), None)
    if ours is None:
        return Whereabouts("the program", _own_collective(frames), place, False)
    phase = _phase(frames[ours], frames[ours - 1] if ours else None)
    waits = _collective(frames, ours, idle and phase == "the backward")
    saves = any(file.startswith(f"{_OURS[0]}checkpoint/") for file in files)
    if saves:
        phase = "saving or reading a checkpoint"
    compiles = any(file.startswith(_COMPILERS) for file in files[:ours])
    if compiles:
        phase = "compiling"
    return Whereabouts(phase, waits, place, compiles or saves or phase in _LONG)


def stack_lines(frame: FrameType) -> list[str]:
    """The stack from the user's first line on, the innermost call last; calls inside torch and Samestep are folded."""
    lines: list[str] = []
    folded: list[str] = []
    frames = list(_outwards(frame))[::-1]
    frames = frames[next((index for index, each in enumerate(frames) if _is_users(each)), 0) :]
    for index, each in enumerate(frames):
        code = each.f_code
        source = linecache.getline(code.co_filename, _line(each)).strip()
        line = f"{_place(each)} in {code.co_name}: {source}".removesuffix(": ")
        if code.co_filename.startswith((*_OURS, _TORCH)) and index + 1 < len(frames):
            folded.append(line)
            continue
        lines += folded if len(folded) < _FOLDED else [f"… {len(folded)} calls in samestep and torch"]
        folded.clear()
        lines.append(line)
    return lines


def _phase(ours: FrameType, called: FrameType | None) -> str:
    """What our innermost function, and what it called, stand for."""
    file, function = ours.f_code.co_filename, ours.f_code.co_name
    if called is None:
        return LOADER if file.startswith(_DATA) else function
    inner, name = called.f_code.co_filename, called.f_code.co_name
    if function == "backward":
        return "the backward"
    if inner.startswith(_DATA) or file.startswith(_DATA):
        return LOADER
    if inner.startswith(f"{_TORCH}optim/") or function == "optimizer_step":
        return "the optimizer's step"
    if not inner.startswith(_TORCH):
        by_name = name.startswith("on_") or name.endswith("_step") or function not in ("train_epoch", "_run_loader")
        return name if by_name else LOADER  # a loader of the user's own
    return function


def _collective(frames: list[FrameType], ours: int, in_backward: bool) -> str:
    """The collective that the thread waits in; empty: none."""
    function, file = frames[ours].f_code.co_name, frames[ours].f_code.co_filename
    if in_backward:
        return "the backward's all-reduce"
    if function == "wait" and ours == 0 and file.endswith("strategies/base.py"):
        return f"the collective {frames[0].f_locals['self'].name!r}"
    if not frames[0].f_code.co_filename.startswith(_DISTRIBUTED):
        return ""
    if file.endswith("strategies/process_group_strategy.py") and "name" in frames[ours].f_locals:
        return f"the collective {frames[ours].f_locals['name']!r}"
    outermost = frames[max(ours - 1, 0)].f_code.co_filename
    if outermost.startswith(_DISTRIBUTED[1]) or function == "wrap":
        return "the construction of DDP"
    return _own_collective(frames)


def _own_collective(frames: list[FrameType]) -> str:
    """A collective of torch's that somebody else than we called: the user, or a module."""
    if not frames[0].f_code.co_filename.startswith(_DISTRIBUTED):
        return ""
    calls = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(_DISTRIBUTED)]
    named = [name for name in calls if name != "wrapper" and not name.startswith("_")]
    return f"torch.distributed.{named[0]}" if named else "DDP's broadcast of buffers"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(_LIBRARIES) and "/site-packages/" not in file


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{_line(frame)}"


def _line(frame: FrameType) -> int:
    """The line a frame is at; that of its function where Python knows none, as between two lines."""
    line: int | None = frame.f_lineno
    return line or frame.f_code.co_firstlineno
