"""What `self.log` collects: values of a step, and sums over an epoch, on their device until they are read."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...strategies.base import Strategy
from ..data.transfer import batch_size_of
from .exchange import is_torchmetric, states_of_all_ranks
from .reduction import LAST_STEP, METRIC, Name, Row, agree_on_names, reduce_rows

REDUCTIONS = ("mean", "sum", "min", "max")
_FUNCTIONS: dict[Any, str] = {
    torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max",
    torch.amin: "min", torch.amax: "max", builtins.sum: "sum", builtins.min: "min", builtins.max: "max",
}  # fmt: skip

# prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only: as given to `log`
Flags = tuple[bool, "bool | None", "bool | None", "bool | None", "str | Callable[..., Any]", bool, bool, bool]


class Entry:
    """One logged name: how it is reduced, the values of the current step, and the sums of the epoch."""

    __slots__ = (
        "flags", "loader", "logger", "metric", "name", "on_epoch", "on_step", "prog_bar", "reduction", "shared", "step",
        "step_values", "suffixed", "total", "weight",
    )  # fmt: skip

    def __init__(
        self, name: str, flags: Flags, on_step: bool, on_epoch: bool, reduction: str, shared: bool, metric: Any
    ) -> None:
        self.name, self.flags = name, flags
        self.on_step, self.on_epoch, self.reduction, self.metric = on_step, on_epoch, reduction, metric
        self.prog_bar, self.logger = flags[0], flags[1] is not False
        # Reduced over the ranks, and so the same on all: what may be monitored.
        self.shared = shared
        self.loader = -1
        # With their weights. None: a single value, of which nobody needs it.
        self.step_values: list[tuple[Tensor | float, int | None]] = []
        self.step = -1
        # The epoch's sum; None: nothing was logged since it was last read. Of a torchmetrics object 0, which keeps its own.
        self.total: Tensor | float | None = None
        self.weight = 0
        self.suffixed = on_step and on_epoch


@dataclass
class Logged:
    """Reduced values by name, sorted by where they go."""

    for_logger: dict[str, float] = field(default_factory=dict[str, float])
    for_progress_bar: dict[str, float] = field(default_factory=dict[str, float])
    for_callbacks: dict[str, float] = field(default_factory=dict[str, float])
    """Only values that are the same on all ranks; under all the names a monitor may use."""

    def add(self, more: Logged) -> None:
        """Take over what was logged later."""
        self.for_logger |= more.for_logger
        self.for_progress_bar |= more.for_progress_bar
        self.for_callbacks |= more.for_callbacks


class MetricLog:
    """All that is logged in one epoch of training, or one evaluation.

    The loop tells it where it stands: `begin_step`, `batch`, `end_step`.
    """

    def __init__(
        self,
        strategy: Strategy,
        task: nn.Module,
        *,
        evaluation: bool = False,
        loaders: int = 1,
        weighted_steps: bool = False,
    ) -> None:
        self._strategy, self._task, self.evaluation = strategy, task, evaluation
        self._entries: dict[str, Entry] = {}
        self._loaders = loaders
        # Where a step's value is a mean over several micro-batches or ranks, their sizes are its weights.
        self._weighted_steps = weighted_steps or strategy.world_size > 1
        self._sized_batch: Any = None
        self._size = 1
        self.step = 0
        """A number for the step that is running; the value says nothing more."""
        self._reduced_step = 0  # the step whose values were reduced last
        self._epoch_step = 0  # the last step of the epoch before
        self._computed: list[Any] = []
        self.batch: Any = None
        """The micro-batch that is running."""
        self.in_step = False
        """Whether a training batch is running: the default of `on_step`."""
        self.dataloader_idx = 0
        """The loader that is running."""
        self.has_batch = True
        """Whether this rank has data in the running training step."""
        self.batches: dict[int, int] = {}
        """Batches this rank has seen of each loader. A rank without any takes the others' names."""

    def begin_step(self) -> None:
        """What is logged from here on belongs to a new step."""
        self.step += 1
        self.in_step = True

    def end_step(self) -> None:
        """No training batch is running any more."""
        self.in_step, self.batch = False, None

    def count_batch(self) -> None:
        """A batch of the running loader is done."""
        self.batches[self.dataloader_idx] = self.batches.get(self.dataloader_idx, 0) + 1

    def record(self, name: str, value: Any, flags: Flags, batch_size: int | None) -> None:
        """Take a value; see `Task.log`."""
        if batch_size is not None and (batch_size.__class__ is not int or batch_size < 1):
            raise ValueError(
                f"self.log({name!r}, batch_size={batch_size!r}): expected a whole number of 1 or more, the samples that the "
                "value is a mean of; leave the call out for a batch without any."
            )
        if self._loaders > 1 and flags[6] and self.batch is not None:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        entry = self._entries.get(name)
        if entry is None or (entry.flags != flags and 0 < entry.step <= self._epoch_step):
            entry = self._entries[name] = self._new_entry(name, value, flags)
        elif entry.flags != flags:
            if entry.flags != _plain(flags):
                raise ValueError(
                    f"self.log({name!r}) was called with other arguments before in this epoch: expected the same in each "
                    "call, or another name."
                )
            entry.flags = flags  # it came from a checkpoint, which can't hold a function
        if entry.metric is not None:
            if entry.on_epoch:
                entry.total = 0.0
            if not entry.on_step:
                return
            value = _batch_value(name, value)
        elif value.__class__ is not Tensor:
            value = _scalar(name, value)
        if value.__class__ is Tensor:
            value = value.detach().clone()  # no graph is kept alive, and it may be changed in place before it is read
            if value.dim() or value.is_complex():
                value = _scalar(name, value)
        if entry.on_step:
            if entry.step != self.step:
                entry.step = self.step
                entry.step_values.clear()
            values, size = entry.step_values, batch_size
            if self._weighted_steps or values:
                size = size or self.batch_size
                if values and values[0][1] is None:
                    values[0] = values[0][0], self.batch_size  # of the same batch
            values.append((value, size))
        if entry.on_epoch and entry.metric is None:
            if entry.reduction == "mean" and batch_size is None:
                # Values logged between batches, by an epoch's hooks, count once.
                batch_size = 1 if self.batch is None else self.batch_size
            self._accumulate(entry, value, batch_size or 0)

    @property
    def batch_size(self) -> int:
        """The number of samples in the running micro-batch."""
        if self._sized_batch is not self.batch:
            self._size, self._sized_batch = batch_size_of(self.batch), self.batch
        return self._size

    def check_apart(self, training: MetricLog, held: Mapping[int, int]) -> None:
        """Refuse torchmetrics objects that got samples of this evaluation into those of the running training epoch.

        Args:
            training: what is logged in the epoch around this evaluation.
            held: how often each object was updated that held samples before it, as `exchange.updates_of` says.

        Raises:
            ValueError: names one that is logged in either.
        """
        for entry in (*self._entries.values(), *training._entries.values()):
            if id(entry.metric) in held and entry.metric.update_count != held[id(entry.metric)]:
                path = _attribute_path(_paths_in(self._task), entry.name, entry.metric)
                raise ValueError(
                    f"self.log({entry.name!r}): the torchmetrics object {path!r} holds samples of the running training epoch, "
                    "and was updated in validation, too: its value would be that of both. Build one for each."
                )

    def _new_entry(self, name: str, value: Any, flags: Flags) -> Entry:
        _check_types(name, flags)
        _, _, on_step, on_epoch, reduce_fx, sync_dist, _, rank_zero_only = flags
        on_step = self.in_step if on_step is None else on_step
        on_epoch = not self.in_step if on_epoch is None else on_epoch
        if on_step and not self.in_step and not (self.evaluation and on_epoch):
            raise ValueError(
                f"self.log({name!r}, on_step=True) outside of a training batch: step values belong to optimizer steps. "
                "Use on_epoch=True."
            )
        if not on_step and not on_epoch:
            raise ValueError(f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing: expected one True.")
        reduction = reduce_fx if isinstance(reduce_fx, str) else _FUNCTIONS.get(reduce_fx, "")
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): expected one of {', '.join(REDUCTIONS)}. For anything else "
                "log a torchmetrics.Metric, which brings its own reduction."
            )
        self._refuse_taken_names(name, suffixed=on_step and on_epoch)
        metric = value if is_torchmetric(value) else None
        shared = self._strategy.world_size == 1 or (sync_dist and not rank_zero_only)
        if metric is not None and shared:
            shared = self._strategy.world_size == 1 or metric.sync_on_compute
        elif metric is not None:
            raise ValueError(
                f"self.log({name!r}): a torchmetrics object reduces itself over the ranks; build it with "
                "sync_on_compute=False instead of sync_dist=False or rank_zero_only=True."
            )
        loader = -1 if self.batch is None else self.dataloader_idx
        others = {e.loader for e in self._entries.values() if metric is not None and e.metric is metric}
        if loader >= 0 and others - {loader, -1}:
            raise ValueError(
                f"self.log({name!r}): this torchmetrics object is logged for another loader already, and can't tell their "
                "samples apart: expected one for each loader (an nn.ModuleList of them)."
            )
        entry = Entry(name, flags, on_step and self.in_step, on_epoch, reduction, shared, metric)
        entry.suffixed, entry.loader = on_step and on_epoch, loader
        return entry

    def _refuse_taken_names(self, name: str, *, suffixed: bool) -> None:
        """Refuse a name that another one is published under, or the other way around."""
        for suffix in ("_step", "_epoch"):
            base = self._entries.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if base is not None and base.suffixed:
                whole, part = base.name, name
            elif suffixed and name + suffix in self._entries:
                whole, part = name, name + suffix
            else:
                continue
            raise ValueError(
                f"self.log({part!r}), and self.log({whole!r}, on_step=True, on_epoch=True), which is published as {whole}_step "
                f"and {whole}_epoch: expected distinct names."
            )

    @staticmethod
    def _accumulate(entry: Entry, value: Tensor | float, size: int) -> None:
        if entry.total is None:
            entry.total = value.double() if isinstance(value, Tensor) else value
            if entry.reduction == "mean":
                entry.total = entry.total * size
        elif entry.reduction == "mean" and isinstance(entry.total, Tensor) and isinstance(value, Tensor):
            entry.total.add_(value, alpha=size)  # computed in float64, since the total is
        elif entry.reduction in ("mean", "sum"):
            # A Python number added to a float32 tensor would be a float32.
            number = value.double() if isinstance(value, Tensor) else value
            entry.total = entry.total + number * (size if entry.reduction == "mean" else 1)
        else:
            choose = torch.minimum if entry.reduction == "min" else torch.maximum
            entry.total = choose(*(torch.as_tensor(v, dtype=torch.float64) for v in (entry.total, value)))
        entry.weight += size

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank has logged and nobody has read yet, in plain types."""
        entries: list[dict[str, Any]] = []
        paths = _paths_in(self._task)
        for entry in self._entries.values():
            kept = {name: getattr(entry, name) for name in _KEPT}
            kept["flags"] = list(_plain(entry.flags))
            kept["total"] = _copied(entry.total)
            kept["step_values"] = [[_copied(value), size] for value, size in entry.step_values]
            kept["metric"] = None if entry.metric is None else _attribute_path(paths, entry.name, entry.metric)
            entries.append(kept)
        steps = [self.step, self._reduced_step, self._epoch_step]
        return {"entries": entries, "steps": steps, "batches": dict(self.batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.step, self._reduced_step, self._epoch_step = state["steps"]
        self.batches = dict(state["batches"])
        device = self._strategy.device
        self._entries = {}
        for kept in state["entries"]:
            metric = None if kept["metric"] is None else self._task.get_submodule(kept["metric"])
            flags = cast("Flags", tuple(kept["flags"]))
            entry = Entry(
                kept["name"], flags, kept["on_step"], kept["on_epoch"], kept["reduction"], kept["shared"], metric
            )
            for name in ("loader", "suffixed", "step", "weight"):
                setattr(entry, name, kept[name])
            entry.total = _copied(kept["total"], device)
            entry.step_values = [(_copied(value, device), size) for value, size in kept["step_values"]]
            self._entries[entry.name] = entry

    # --- reading ---------------------------------------------------------------------------

    def reduce_step(self) -> Logged:
        """Reduce the newest step values over their micro-batches and the ranks: one collective.

        A name that was not logged in this very step, but since the last time, is shown now: none is lost.
        """
        entries = [entry for entry in self._entries.values() if entry.on_step and entry.step > self._reduced_step]
        if not self.has_batch:
            entries = []  # of an earlier step: the values of this one are those of the ranks that have data
        self._reduced_step = self.step
        if self._strategy.world_size == 1:  # nothing to agree on: this is in one step of many, and still adds up
            return self._sorted({entry.name: _step_value(entry) for entry in entries}, "step")
        return self._reduce({entry.name: _step_row(entry) for entry in entries}, {}, "step")

    def reduce_epoch(self, *, with_step: bool = False) -> Logged:
        """Reduce what was logged for the epoch since the last time, over the ranks; compute torchmetrics objects.

        Called at the epoch's end, and again after the hooks that may log more. `close_epoch` starts anew. With
        `with_step`, the newest step values are reduced along, for monitors.
        """
        rows: dict[str, Row] = {}
        metrics: dict[str, Any] = {}
        for entry in self._entries.values():
            if entry.total is not None and entry.metric is not None:
                metrics[entry.name] = entry.metric
            elif entry.total is not None:
                rows[entry.name] = Row(entry.reduction, entry.total, float(entry.weight))
            elif not with_step or not self.has_batch:
                continue  # as in `reduce_step`
            elif entry.on_step and entry.step > max(self._reduced_step, self._epoch_step):
                rows[entry.name] = _step_row(entry)
        logged = self._reduce(rows, metrics, "epoch")
        for entry in self._entries.values():
            entry.total, entry.weight = None, 0
        return logged

    def close_epoch(self) -> None:
        """Reset the torchmetrics objects, and start anew. Until here, hooks may read them."""
        for metric in self._computed:
            metric.reset()
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        # A step value that waits for the next step that logs is not lost with the epoch.
        waiting = {name: entry for name, entry in self._entries.items() if entry.step > self._reduced_step}
        self._computed, self._entries, self.batches = [], waiting, {}
        self._epoch_step = self.step

    def _reduce(self, rows: dict[str, Row], metrics: dict[str, Any], when: str) -> Logged:
        entries = self._entries
        shared = {name: row for name, row in rows.items() if entries[name].shared}
        values = {name: row.local_value() for name, row in rows.items() if name not in shared}
        names: list[Name] = []
        for name, row in shared.items():
            of_step = when == "epoch" and entries[name].total is None
            names.append(Name(name, row.reduction, LAST_STEP if of_step else entries[name].loader))
        paths = _paths_in(self._task) if metrics else {}
        for name, metric in metrics.items():
            path = _attribute_path(paths, name, metric)
            names.append(Name(name, METRIC + path, entries[name].loader, metric.update_called))
        names.sort(key=lambda name: name.name)
        flags = {name.name: entries[name.name].flags for name in names}
        batches = self.batches if self.has_batch or when == "epoch" else {}
        if self.has_batch:
            batches = {**batches, LAST_STEP: sum(batches.values())}
        agreed = agree_on_names(self._strategy, names, shared, flags, batches, when)
        for name, theirs in agreed.flags.items():
            if name not in entries:  # this rank had no batch that would have logged it
                entry = entries[name] = Entry(name, theirs, False, True, "mean", True, None)
                entry.suffixed = bool(theirs[2])
        values |= reduce_rows(agreed)
        objects = {
            name.name: self._task.get_submodule(name.metric_path)
            for name in agreed.names
            if name.metric_path is not None
        }
        with states_of_all_ranks(self._strategy, list(objects.values())):
            values |= {name: _compute(name, metric) for name, metric in objects.items()}
        self._computed += objects.values()
        return self._sorted(values, when)

    def _sorted(self, values: Mapping[str, float], when: str) -> Logged:
        """Reduced values, by where they go."""
        result = Logged()
        for name, value in values.items():
            entry = self._entries[name]
            public = f"{name}_{when}" if entry.suffixed else name
            if entry.logger and (when == "step" or entry.on_epoch):  # no step is logged twice
                result.for_logger[public] = value
            if entry.prog_bar:
                result.for_progress_bar[public] = value
            if entry.shared:
                result.for_callbacks[public] = value
                result.for_callbacks[name] = value
        return result

    def waits_for(self, name: str) -> str | None:
        """Whether a value under this public name was logged and is not reduced yet, and with what it will be.

        Returns:
            "step": with the next step that logs; "epoch": at the epoch's end; None: nothing of that name waits.
        """
        for entry in self._entries.values():
            for when, awaited in (("step", entry.on_step), ("epoch", entry.on_epoch)):
                if awaited and (name == entry.name or (entry.suffixed and name == f"{entry.name}_{when}")):
                    return when
        return None

    def unshared_names(self) -> list[str]:
        """Names whose values differ from rank to rank, which nothing may monitor."""
        return [name for name, entry in self._entries.items() if not entry.shared and self._strategy.world_size > 1]


_KEPT = ("name", "on_step", "on_epoch", "reduction", "shared", "loader", "suffixed", "step", "weight")


def _plain(flags: Flags) -> Flags:
    """The flags with the name of a reduction in place of its function."""
    reduce_fx = flags[4]
    return flags if isinstance(reduce_fx, str) else (*flags[:4], _FUNCTIONS.get(reduce_fx, ""), *flags[5:])


def _copied(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device or value.device, copy=True) if isinstance(value, Tensor) else value


def _step_value(entry: Entry) -> float:
    """The step's value of this rank alone."""
    if len(entry.step_values) == 1:
        return float(entry.step_values[0][0])
    return _step_row(entry).local_value()


def _step_row(entry: Entry) -> Row:
    values = [(torch.as_tensor(value, dtype=torch.float64), size or 1) for value, size in entry.step_values]
    if entry.reduction == "mean":
        total = sum((value * size for value, size in values), torch.zeros((), device=values[0][0].device))
        return Row("mean", total, float(sum(size for _, size in values)))
    numbers = torch.stack([value for value, _ in values])
    reduce = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[entry.reduction]
    return Row(entry.reduction, reduce(numbers), 0.0)


def _check_types(name: Any, flags: Flags) -> None:
    """Refuse a name that is no text, and switches that are neither on nor off.

    Raises:
        TypeError: names the argument.
        ValueError: the name is empty, or a column that loggers write themselves.
    """
    if not isinstance(name, str):
        raise TypeError(f"self.log({name!r}, …): expected the name as a string, received {type(name).__name__}.")
    if name in ("", "step", "hyperparameters"):
        why = "no name" if not name else "what loggers write beside the values"
        raise ValueError(f"self.log({name!r}, …): that is {why}. Expected a name of its own, such as 'train/loss'.")
    prog_bar, logger, on_step, on_epoch, _, sync_dist, add_dataloader_idx, rank_zero_only = flags
    switches = {
        "prog_bar": prog_bar, "sync_dist": sync_dist, "add_dataloader_idx": add_dataloader_idx,
        "rank_zero_only": rank_zero_only,
    }  # fmt: skip
    optional = {"logger": logger, "on_step": on_step, "on_epoch": on_epoch}
    switches |= {argument: value for argument, value in optional.items() if value is not None}
    for argument, value in switches.items():
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"self.log({name!r}, {argument}={value!r}): expected True or False.")


def _scalar(name: str, value: Any) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(())
        if value.is_complex():
            raise ValueError(f"self.log({name!r}): a complex tensor, expected a real scalar, such as its .abs().")
        raise ValueError(
            f"self.log({name!r}): a tensor of shape {list(value.shape)}, expected a scalar. Reduce it first."
        )
    try:
        if not isinstance(value, str):
            return float(value)  # numpy's scalars, too
        raise TypeError
    except (TypeError, ValueError):
        raise TypeError(
            f"self.log({name!r}): {type(value).__name__} is no number, scalar tensor or torchmetrics.Metric. "
            "Several values: self.log_dict."
        ) from None


def _batch_value(name: str, metric: Any) -> Any:
    value = metric._forward_cache
    if value is None:
        raise ValueError(
            f"self.log({name!r}, on_step=True): the metric has no value of the batch, since it was only updated. "
            "Call it, `self.metric(preds, target)`, or log it with on_step=False, on_epoch=True."
        )
    return value


def _paths_in(task: nn.Module) -> dict[int, str]:
    """Where each module is in the task, by its `id`: the hash of a metric, which is slow, changes with its states."""
    return {id(module): path for path, module in cast("Iterable[tuple[str, nn.Module]]", task.named_modules())}


def _attribute_path(paths: Mapping[int, str], name: str, metric: Any) -> str:
    path = paths.get(id(metric))
    if path is None:
        raise ValueError(
            f"self.log({name!r}): the metric is no attribute of the task, so it can't be reset, moved to the device or "
            "saved. Set it in __init__: self.accuracy = Accuracy(…)."
        )
    return path


def _compute(name: str, metric: Any) -> float:
    with warnings.catch_warnings():
        if not metric.update_called:  # no batch on this rank; the others' states come in by the reduction
            warnings.filterwarnings("ignore", message="The ``compute`` method")
        value = metric.compute()
    return float(_scalar(name, value))
