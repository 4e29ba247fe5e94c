"""`samestep ckpt`: list, check, compare and export checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..checkpoint.folder import MODEL, TRAINING, CheckpointError, checkpoints_in, damage, is_checkpoint, read_manifest

DESCRIPTION = "list, verify, compare and export checkpoints"

_UNITS = ("B", "kB", "MB", "GB", "TB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its subcommands and their arguments."""
    commands = parser.add_subparsers(metavar="what", required=True)
    for name, help_text in {
        "ls": "the checkpoints in a folder, the one made last first",
        "verify": "compare every file with its checksum; exit status 1 where one is damaged",
        "diff": "what differs between two checkpoints; exit status 1 where something does",
        "export": "the weights alone, for other programs",
    }.items():
        command = commands.add_parser(name, help=help_text, description=f"{help_text}.")
        command.set_defaults(what=name)
        if name == "ls":
            command.add_argument("folder", type=Path, help="of checkpoints, or of a run")
            command.add_argument("--verify", action="store_true", help="check every file: reads all of them")
        elif name == "verify":
            command.add_argument(
                "paths", type=Path, nargs="+", metavar="path", help="a checkpoint, a folder of them, or a run's"
            )
        elif name == "diff":
            command.add_argument("first", type=Path)
            command.add_argument("second", type=Path)
            command.add_argument("--limit", type=int, default=20, help="lines that are printed (default 20; 0: all)")
        else:
            command.add_argument("path", type=Path, help="a checkpoint")
            command.add_argument("out", type=Path, help="the file to write")
            command.add_argument(
                "--format",
                choices=("safetensors", "torch"),
                default="safetensors",
                help="torch: a plain state dict for torch.load",
            )
        if name != "export":
            command.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return the exit status."""
    try:
        return {"ls": _ls, "verify": _verify, "diff": _diff, "export": _export}[arguments.what](arguments)
    except (CheckpointError, OSError) as error:
        print(f"samestep ckpt {arguments.what}: {error}", file=sys.stderr)
        return 2


# --- ls --------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected one with checkpoints, or the folder of a run.")
    folder = _folder_of(folder)
    entries = [_entry(path, verify=arguments.verify) for path, _ in checkpoints_in(folder)]
    if arguments.json:
        print(json.dumps(_plain(entries), indent=2, allow_nan=False))
    elif entries:
        print(_table(entries))
    else:
        print(f"no checkpoints in {folder}")
    return int(any(entry["problems"] for entry in entries))


def _folder_of(folder: Path) -> Path:
    """The folder itself, or that of its checkpoints, where it is a run's."""
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() and not checkpoints_in(folder) else folder


def _entry(path: Path, *, verify: bool) -> dict[str, Any]:
    """What `ls` tells of a checkpoint: of its manifest, and of the sizes of its files."""
    links = [link for link in ("best", "last") if _leads_to(path.parent / link, path)]
    entry: dict[str, Any] = {"name": path.name, "path": os.fspath(path), "links": links, "problems": []}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {**entry, "problems": [str(error)]}
    files: dict[str, Any] = manifest["files"]
    sizes = [file.stat().st_size if (file := path / name).is_file() else -1 for name in files]
    entry["problems"] = (
        list(damage(path, manifest))
        if verify
        else [
            f"{path / name} {'is missing' if size < 0 else 'has another size'}"
            for (name, expected), size in zip(files.items(), sizes, strict=True)
            if size != expected["size"]
        ]
    )
    told = ("step", "epoch", "created", "world_size", "task", "weights_only", "finite", "metrics", "versions", "format")
    return {**entry, **{name: manifest.get(name) for name in told}, "size": sum(size for size in sizes if size > 0)}


def _leads_to(link: Path, path: Path) -> bool:
    return link.is_symlink() and link.resolve() == path.resolve()


def _table(entries: Sequence[dict[str, Any]]) -> str:
    rows = [["checkpoint", "step", "epoch", "made", "ranks", "size", "metrics", ""]]
    for entry in entries:
        metrics: dict[str, float] = entry.get("metrics") or {}
        told = ", ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:3])
        if len(metrics) > 3:
            told += f", +{len(metrics) - 3}"
        marks = list(entry["links"])
        marks += ["weights only"] if entry.get("weights_only") else []
        marks += ["not finite"] if entry.get("finite") is False else []
        marks += ["damaged"] if entry["problems"] else []
        numbers = [str(entry.get(name, "?")) for name in ("step", "epoch")]
        made = _local(entry["created"]) if entry.get("created") else "?"
        ranks, size = str(entry.get("world_size", "?")), _size(entry["size"]) if "size" in entry else "?"
        rows.append([entry["name"], *numbers, made, ranks, size, told, ", ".join(marks)])
    return _aligned(rows, right={1, 2, 4, 5})


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _local(created: str) -> str:
    """The time in the reader's zone."""
    made = datetime.fromisoformat(created)
    made = made if made.tzinfo else made.replace(tzinfo=timezone.utc)
    return made.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _size(size: float) -> str:
    unit = 0
    while size >= 999.5 and unit + 1 < len(_UNITS):
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 99.5 else f"{size:.1f} {_UNITS[unit]}"


def _plain(value: Any) -> Any:
    """For JSON, which has no inf and NaN: they become strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}  # pyright: ignore
    if isinstance(value, list):
        return [_plain(item) for item in value]  # pyright: ignore
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


# --- verify ----------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    paths = [path for given in arguments.paths for path in _checkpoints_at(given)]
    results: dict[str, list[str]] = {}
    for path in paths:
        try:
            results[os.fspath(path)] = list(damage(path, read_manifest(path)))
        except CheckpointError as error:
            results[os.fspath(path)] = [str(error)]
        if not arguments.json:
            problems = results[os.fspath(path)]
            print(f"{path}: {'damaged' if problems else 'intact'}", flush=True)
            for problem in problems:
                print(f"  {problem}")
    if arguments.json:
        print(json.dumps(results, indent=2))
    return int(any(results.values()))


def _checkpoints_at(path: Path) -> Iterator[Path]:
    """The path itself, or the checkpoints in the folder that it is, or in that of the run.

    Raises:
        CheckpointError: there is none, nor what is left of one.
    """
    if is_checkpoint(path) or any((path / name).exists() for name in (MODEL, TRAINING)):
        yield path
        return
    folder = _folder_of(path)
    found = checkpoints_in(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}" if path.is_dir() else f"{path} is no folder.")
    yield from (checkpoint for checkpoint, _ in found)


# --- diff ------------------------------------------------------------------------------------


def _diff(arguments: argparse.Namespace) -> int:
    from ..checkpoint.compare import differences

    found = differences(arguments.first, arguments.second)
    if arguments.json:
        print(json.dumps(_plain([difference._asdict() for difference in found]), indent=2, allow_nan=False))
        return int(bool(found))
    if not found:
        print("equal bitwise: weights, optimizers, schedulers, progress, random numbers, metrics")
        return 0
    limit: int = arguments.limit or len(found)
    rows = [["where", "first", "second", "greatest difference"]]
    rows += [
        [_shortened(d.where), d.first, d.second, "" if d.greatest is None else f"{d.greatest:.3g}"]
        for d in found[:limit]
    ]
    print(_aligned(rows, right={3}))
    parts: dict[str, int] = {}
    for difference in found:
        part = difference.where.split(" ", 1)[0]
        parts[part] = parts.get(part, 0) + 1
    if len(found) > limit:
        print(f"… and {len(found) - limit} more (--limit 0 prints all)")
    print(f"{len(found)} differences: " + ", ".join(f"{count} in {part}" for part, count in parts.items()))
    return 1


def _shortened(text: str, most: int = 72) -> str:
    """Without its middle, where it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 + 1 :]}"


# --- export ----------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from ..checkpoint import read_checkpoint

    out: Path = arguments.out
    if out.exists():
        raise FileExistsError(f"{out} is there already: expected the name of a new file.")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} is no folder: make it first.")
    checkpoint = read_checkpoint(arguments.path)
    if arguments.format == "torch":
        import torch

        torch.save(checkpoint.model, out)
    else:
        from ..checkpoint.weights import save_tensors, split_tensors

        tensors, extra = split_tensors(checkpoint.model)
        if extra:
            raise CheckpointError(
                f"{arguments.path} holds {', '.join(extra)}, which is no tensor: use --format torch, which keeps it."
            )
        save_tensors(tensors, out)
    print(
        f"{len(checkpoint.model)} tensors of step {checkpoint.manifest['step']} in {out} ({_size(out.stat().st_size)})"
    )
    return 0
