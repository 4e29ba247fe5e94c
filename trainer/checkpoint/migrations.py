"""The versions of a checkpoint's format, and how older ones are brought to the present one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FORMAT = 1
"""The version that is written. It is raised when a reader of the old one would misunderstand the new one."""

State = dict[str, Any]
Migration = Callable[[str, State], State]

MIGRATIONS: dict[int, Migration] = {}
"""By the version that is read: how one file's state (its name, what it holds) becomes that of the next version."""


def migrated(version: int, file: str, state: State) -> State:
    """The state of a file as the present version would have written it."""
    for older in range(version, FORMAT):
        state = MIGRATIONS[older](file, state)
    return state
