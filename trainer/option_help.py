"""What `--help` prints: every option with its type, its default, and what its dataclass says about it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

_WIDTH = 100


def option_help(options: Any, program: str) -> str:
    """The text for a dataclass of defaults, nested ones included.

    The words about an option are the string below its field, or the comment behind it.
    """
    lines = [f"usage: {program} [name=value …]"]
    for name, kind, default, words in _described(options, ""):
        lines += ["", f"{name}: {kind} = {default!r}"]
        lines += textwrap.wrap(words, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _described(options: Any, path: str) -> Iterator[tuple[str, str, Any, str]]:
    """Name, type, default and words of each option."""
    written = _written(options.__class__)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _described(value, f"{path}{field.name}.")
        else:
            kind, words = written.get(field.name, (_name_of(field.type), ""))
            yield path + field.name, kind, value, words


def _written(kind: type) -> dict[str, tuple[str, str]]:
    """The type and the words of each field, as they stand in the source; nothing where there is none."""
    fields: dict[str, tuple[str, str]] = {}
    for each in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):
            continue
        lines = source.splitlines()
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.ClassDef)
        for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words = _text(following) or _comment(lines[(node.end_lineno or 1) - 1])
                fields[node.target.id] = ast.unparse(node.annotation), words
    return fields


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _comment(line: str) -> str:
    return line.rpartition("  # ")[2] if "  # " in line else ""


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
