"""Hyperparameters: the arguments a task or data module was built with, kept for checkpoint and log."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are attributes, too: `hparams["lr"]` or `hparams.lr`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}: there are {', '.join(self) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperparametersMixin:
    """`save_hyperparameters` and `hparams`, for `Task` and `DataModule`."""

    logs_hyperparameters: bool = False
    """Whether `save_hyperparameters` was called, and not with `logger=False`."""

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` kept."""
        # Not set in __init__: a data module may be written without calling it.
        kept = vars(self).get("_hparams")
        if kept is None:
            kept = Hyperparameters()
            object.__setattr__(self, "_hparams", kept)
        return kept

    def save_hyperparameters(self, *args: Any, ignore: str | Sequence[str] | None = None, logger: bool = True) -> None:
        """Keep the arguments of `__init__`, from where it is called, for `hparams`, checkpoints and loggers.

        Where a parent class calls it, too, the subclass has the last word: what it ignores is not kept.

        Args:
            args: names of the arguments to keep (default: all), or one dict or Namespace to keep instead.
            ignore: names to leave out.
            logger: also give them to the loggers.

        Raises:
            TypeError: a value is no number, string, list or dict of such, and could not be read back from a
                checkpoint without running code. Leave it out with `ignore`. An argument of a subclass is refused
                when a run starts: the subclass may still ignore it.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        object.__setattr__(self, "logs_hyperparameters", logger)
        outer: set[str] = set()
        depth = 0
        if len(args) == 1 and isinstance(args[0], (Mapping, Namespace)):
            given = vars(args[0]) if isinstance(args[0], Namespace) else cast("Mapping[str, Any]", args[0])
        else:
            frame = inspect.currentframe()
            calls = _init_arguments(self, frame.f_back if frame else None)
            depth = len(calls)
            outer = {name for call in calls[1:] for name in call}
            given = {name: value for call in calls for name, value in call.items()}  # a subclass's over its parents'
            names: list[str] = list(args) or list(given)
            unknown = [name for name in names if name not in given]
            if unknown:
                raise ValueError(
                    f"save_hyperparameters: {type(self).__name__}.__init__ has no argument "
                    f"{', '.join(map(repr, unknown))}; it has {', '.join(given) or 'none'}."
                )
            given = {name: given[name] for name in names}
        record = _record_of(self)
        for name in ignored:
            record.ignored[name] = min(depth, record.ignored.get(name, depth))
            record.refused.pop(name, None)
            self.hparams.pop(name, None)
        for name, value in given.items():
            if name in ignored or record.ignored.get(name, depth) < depth:
                continue
            try:
                self.hparams[name] = _plain(value, f"{type(self).__name__}'s argument {name!r}")
            except TypeError as error:
                if name not in outer:
                    raise
                record.refused[name] = str(error)


@dataclass
class _Record:
    """What the calls of `save_hyperparameters` on one object have said so far."""

    ignored: dict[str, int] = field(default_factory=dict[str, int])
    """Names to leave out, each with the depth of the `__init__` that said so: the subclass's is 1, its parent's 2."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Arguments of a subclass that could not be kept, with the reason."""


def _record_of(holder: HyperparametersMixin) -> _Record:
    record = vars(holder).get("_hyperparameter_record")
    if record is None:
        record = _Record()
        object.__setattr__(holder, "_hyperparameter_record", record)
    return record


def check_hyperparameters(holder: HyperparametersMixin) -> None:
    """Refuse arguments that a parent class was to keep, and could not, and that no subclass left out.

    Raises:
        TypeError: names the argument and the remedy.
    """
    for reason in _record_of(holder).refused.values():
        raise TypeError(reason)


def _init_arguments(instance: object, frame: FrameType | None) -> list[dict[str, Any]]:
    """The arguments of each `__init__` of this instance that is running, from where `frame` is out to the subclass's."""
    calls: list[dict[str, Any]] = []
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, var_keywords, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not instance:
            break
        arguments = {name: values[name] for name in names[1:]}
        count = frame.f_code.co_argcount
        arguments |= {name: values[name] for name in frame.f_code.co_varnames[count:][: frame.f_code.co_kwonlyargcount]}
        if var_keywords:
            arguments |= values[var_keywords]
        calls.append(arguments)
        frame = frame.f_back
    return calls


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(cast("list[Any]", value))]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(
        f"save_hyperparameters: {where} is a {type(value).__name__}, which could not be read back from a checkpoint "
        "without running code: expected numbers, strings, and lists or dicts of them. "
        "Leave it out: save_hyperparameters(ignore=[…])."
    )
