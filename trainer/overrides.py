"""Options from the command line: `name=value` pairs, checked against a typed dataclass."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .config import TrainerConfig
from .placement import placed_strategy

T = TypeVar("T")


def from_command_line(defaults: T, arguments: Sequence[str] | None = None) -> T:
    """Apply overrides such as `trainer.max_epochs=3 batch_size=64` to a dataclass of defaults.

    With `--help` (or `-h`) among them, rank 0 prints all options, and the program leaves with exit status 0.

    Args:
        defaults: an instance of a dataclass, nested ones included (a `TrainerConfig` among its fields, say).
        arguments: the overrides; default: this process's command line.

    Returns:
        A new instance of the same class. A bad override prints one line and leaves with exit status 2; so do
        options of a `TrainerConfig` that no Trainer could be built with here.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        from .option_help import option_help  # only here: it reads source files

        if os.environ.get("RANK", "0") == "0":
            print(option_help(defaults, os.path.basename(sys.argv[0])))
        raise SystemExit(0)
    try:
        options = apply_overrides(defaults, arguments)
        for config in _trainer_configs(options):
            placed_strategy(config.strategy, config)  # starts nothing, but raises what a Trainer would
    except ValueError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return options


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
            override: Any = _read(text, _kind_of(defaults, key, text))
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


# --- names -----------------------------------------------------------------------------------


def option_names(options: Any) -> Iterator[str]:
    """The names of all options, those of nested dataclasses with their path before them."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from (f"{field.name}.{name}" for name in option_names(value))
        else:
            yield field.name


def _kind_of(options: Any, key: str, text: str) -> Any:
    """The type of the field called `key`; Any inside a list or dict, where OmegaConf judges.

    Raises:
        ValueError: there is none; names the one that was probably meant.
    """
    node, kind = options, Any
    for part in key.split("."):
        if not dataclasses.is_dataclass(node):
            return Any
        if part not in {field.name for field in dataclasses.fields(node)}:
            near = _nearest(key, list(option_names(options)))
            hint = f"did you mean '{near}={text}'?" if near else "--help lists those there are."
            raise ValueError(f"there is no option {key!r}: {hint}")
        kind, node = get_type_hints(type(node))[part], getattr(node, part)
    return kind


def _nearest(key: str, names: list[str]) -> str | None:
    """The option that was probably meant: of the same name elsewhere, or of nearly the same."""
    key = key.lstrip("-")
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    if key.rpartition(".")[2] in last:
        return last[key.rpartition(".")[2]]
    near = get_close_matches(key, names, 1) or get_close_matches(key, last, 1)
    return last.get(near[0], near[0]) if near else None


# --- values ----------------------------------------------------------------------------------

_CONSTANTS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


def _read(text: str, kind: Any) -> Any:
    """The text as the field's type wants it; where that is Any, as it looks."""
    kinds = _members(kind)
    if text[0] not in "[{" or kinds <= {str, NoneType}:
        return _scalar(text, kinds)
    import yaml

    try:
        # Every scalar stays the text that it is: YAML's own reading takes 010 for 8 and 12:30 for 750.
        return _typed(yaml.load(text, yaml.BaseLoader), kind)
    except yaml.YAMLError as error:
        raise ValueError(f"no list or dict: {error}") from None


def _typed(value: Any, kind: Any) -> Any:
    """A list or dict of texts, with each text as the type of the elements wants it."""
    inside = {get_origin(member): get_args(member) for member in _members(kind)}
    if isinstance(value, list):
        element = (inside.get(list) or inside.get(tuple) or (Any,))[0]
        return [_typed(item, element) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        keys, values = inside.get(dict, (Any, Any))
        return {_typed(key, keys): _typed(item, values) for key, item in cast("dict[str, Any]", value).items()}
    return _scalar(value, _members(kind))


def _scalar(text: str, kinds: set[Any]) -> Any:
    anything = Any in kinds or not kinds & {str, int, float, bool}
    if text in _CONSTANTS and (anything or type(_CONSTANTS[text]) in kinds or str not in kinds):
        return _CONSTANTS[text]
    for number in (int, float):
        if anything or number in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    return text.replace("${", r"\${")  # which OmegaConf would replace by another option


def _members(kind: Any) -> set[Any]:
    """The types of a union, and those of a Literal's values; else the type alone."""
    if get_origin(kind) in (Union, UnionType):
        return {member for each in get_args(kind) for member in _members(each)}
    if get_origin(kind) is Literal:
        return {type(value) for value in get_args(kind)}
    return {kind}


# --- options of a Trainer among them ---------------------------------------------------------


def _trainer_configs(options: Any) -> Iterator[TrainerConfig]:
    """Those among the options, however deep."""
    if isinstance(options, TrainerConfig):
        yield options
    elif dataclasses.is_dataclass(options):
        for field in dataclasses.fields(options):
            yield from _trainer_configs(getattr(options, field.name))
