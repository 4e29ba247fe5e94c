"""Options from the command line: `name=value` pairs, checked against a typed dataclass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def from_command_line(defaults: T, arguments: Sequence[str] | None = None) -> T:
    """Apply overrides such as `trainer.max_epochs=3 batch_size=64` to a dataclass of defaults.

    Args:
        defaults: an instance of a dataclass, nested ones included (a `TrainerConfig` among its fields, say).
        arguments: the overrides; default: this process's command line.

    Returns:
        A new instance of the same class. A bad override prints one line and leaves with exit status 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return apply_overrides(defaults, arguments)
    except ValueError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def apply_overrides(defaults: T, arguments: Sequence[str]) -> T:
    """As `from_command_line`, but raise `ValueError`: expected, received, and the nearest name."""
    from omegaconf import OmegaConf  # only where a command line is read: importing it takes time
    from omegaconf.errors import OmegaConfBaseException

    config: Any = OmegaConf.structured(defaults)
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key or not text:
            raise ValueError(f"{argument!r}: expected name=value, such as trainer.max_epochs=3 (name=null for None).")
        try:
            override: Any = _parse(text)
            for part in reversed(key.split(".")):
                override = {part: override}
            config = OmegaConf.merge(config, override)  # unlike an update, it may change frozen dataclasses
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            raise ValueError(f"{argument!r}: {str(error).splitlines()[0]}") from None
    try:
        result: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(str(error.__cause__ or error).splitlines()[0]) from None
    return result


_CONSTANTS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


def _parse(text: str) -> Any:
    # Not YAML's own reading of scalars: it takes 010 for 8 and 12:30 for 750.
    from omegaconf import OmegaConf

    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in "[{":
        try:
            return OmegaConf.create(text)
        except Exception as error:  # of the YAML reader, which is not ours to name
            raise ValueError(f"no list or dict: {error}") from None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
