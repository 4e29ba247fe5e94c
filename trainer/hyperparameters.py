"""Hyperparameters: the arguments a task or data module was built with, kept for checkpoint and log."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
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

        Args:
            args: names of the arguments to keep (default: all), or one dict or Namespace to keep instead.
            ignore: names to leave out.
            logger: also give them to the loggers.

        Raises:
            TypeError: a value is no number, string, list or dict of such, and could not be read back from a
                checkpoint without running code. Leave it out with `ignore`.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        object.__setattr__(self, "logs_hyperparameters", logger)
        if len(args) == 1 and isinstance(args[0], (Mapping, Namespace)):
            given = vars(args[0]) if isinstance(args[0], Namespace) else cast("Mapping[str, Any]", args[0])
        else:
            frame = inspect.currentframe()
            given = _init_arguments(self, frame.f_back if frame else None)
            names: list[str] = list(args) or list(given)
            unknown = [name for name in names if name not in given]
            if unknown:
                raise ValueError(
                    f"save_hyperparameters: {type(self).__name__}.__init__ has no argument "
                    f"{', '.join(map(repr, unknown))}; it has {', '.join(given) or 'none'}."
                )
            given = {name: given[name] for name in names}
        for name, value in given.items():
            if name not in ignored:
                self.hparams[name] = _plain(value, f"{type(self).__name__}'s argument {name!r}")


def _init_arguments(instance: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the `__init__`s of this instance that are running, a subclass's over its parents'."""
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        names, var_args, var_keywords, values = inspect.getargvalues(frame)
        if not names or values.get(names[0]) is not instance:
            break
        arguments |= {name: values[name] for name in names[1:]}
        count = frame.f_code.co_argcount
        arguments |= {name: values[name] for name in frame.f_code.co_varnames[count:][: frame.f_code.co_kwonlyargcount]}
        if var_keywords:
            arguments |= values[var_keywords]
        del var_args
        frame = frame.f_back
    return arguments


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
