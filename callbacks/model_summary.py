"""A table of the model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .callback import Callback

if TYPE_CHECKING:
    from torch import nn

    from ..trainer import Task, Trainer


class ModelSummary(Callback):
    """Prints, when fit starts, the layers with their types and numbers of parameters, from rank 0.

    Args:
        max_depth: how deep to go into nested layers; 0: totals only, -1: all the way.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ValueError(f"ModelSummary(max_depth={max_depth}): expected -1 (all), 0, or more.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Print the table."""
        trainer.print(summarize(task, self.max_depth))


def summarize(task: nn.Module, max_depth: int = 1) -> str:
    """The table as text."""
    rows: list[tuple[str, str, str]] = []
    modules: list[tuple[str, nn.Module]] = list(task.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    for name, module in modules:
        depth = name.count(".") + 1
        if name and (max_depth < 0 or depth <= max_depth):
            count = sum(parameter.numel() for parameter in module.parameters())
            rows.append((name, type(module).__name__, f"{count:,}"))
    total = sum(parameter.numel() for parameter in task.parameters())
    trainable = sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    size = sum(parameter.numel() * parameter.element_size() for parameter in task.parameters())
    lines = []
    if rows:
        widths = [max(len(row[i]) for row in [("layer", "type", "parameters"), *rows]) for i in range(3)]
        header = ("layer", "type", "parameters")
        lines = [
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}" for name, kind, count in (header, *rows)
        ]
        lines.insert(1, "─" * len(lines[0]))
        lines.append(lines[1])
    asleep = [name or "the task" for name, module in modules if not module.training]
    if asleep:  # said, since a task that was evaluated by hand is easily left so
        lines.append(f"in eval mode, and left so: {', '.join(asleep[:5])}{', …' if len(asleep) > 5 else ''}")
    lines.append(f"{trainable:,} trainable parameters, {total - trainable:,} not; {size / 2**20:.2f} MiB")
    return "\n".join(lines)
