"""The metrics that validate and test return, and the table of them that they print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .metrics.log import Logged


def results_by_loader(logged: Logged, loaders: int) -> list[dict[str, float]]:
    """For each of so many loaders, its metrics by name, and those that are of no loader alone."""
    values = {**logged.for_callbacks, **logged.for_logger}
    if loaders == 1:
        return [values]
    marks = [f"/dataloader_idx_{index}" for index in range(loaders)]
    common = {name: value for name, value in values.items() if not name.endswith(tuple(marks))}
    return [{**common, **{name: value for name, value in values.items() if name.endswith(mark)}} for mark in marks]


def print_results(results: Sequence[Mapping[str, float]], stage: str) -> None:
    """Print one line for each metric, one column for each loader."""
    names = sorted({name.partition("/dataloader_idx_")[0] for result in results for name in result})
    width = max([len(name) for name in names] + [len(stage)])
    columns = [f"loader {index}" for index in range(len(results))] if len(results) > 1 else ["value"]
    print(f"{stage:<{width}}  " + "  ".join(f"{column:>12}" for column in columns))
    for name in names:
        values = [
            result.get(name, result.get(f"{name}/dataloader_idx_{index}")) for index, result in enumerate(results)
        ]
        print(f"{name:<{width}}  " + "  ".join(f"{'' if v is None else format(v, '.6g'):>12}" for v in values))
