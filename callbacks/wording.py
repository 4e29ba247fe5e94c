"""Numbers in sentences."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """The number with its noun, of which an `s` makes the plural: "1 step", "1,234 steps", "2 batches"."""
    plural = f"{noun}es" if noun.endswith("tch") else f"{noun}s"
    return f"{number:,.0f} {noun if number == 1 else plural}"
