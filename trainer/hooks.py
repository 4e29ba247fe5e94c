"""Hooks: which methods are hooks, who overrides them, and the table the loops call through.

`HookTable` is built once a run. It holds, for each hook, a tuple of bound methods: only the overridden ones,
so a hook nobody overrides costs a check of an empty tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from ..callbacks.callback import Callback
from ..callbacks.logger import Logger
from .misnomers import STEPS, check_names, methods_of
from .task import Task

Hook = Callable[..., Any]


def _hook_names(base: type) -> tuple[str, ...]:
    return tuple(name for name in vars(base) if name.startswith("on_"))


CALLBACK_HOOKS = _hook_names(Callback)
TASK_HOOKS = _hook_names(Task)


class HookTable:
    """The overridden hooks of a run: one attribute for each hook, a tuple of what to call as `(trainer, task, …)`."""

    __slots__ = (*CALLBACK_HOOKS, "monitor_train_epoch_end")

    # Those that the training loop calls by name; the others go through `of`.
    on_train_epoch_start: tuple[Hook, ...]
    on_train_epoch_end: tuple[Hook, ...]
    on_train_batch_start: tuple[Hook, ...]
    on_train_batch_end: tuple[Hook, ...]
    on_train_step_end: tuple[Hook, ...]
    on_before_zero_grad: tuple[Hook, ...]
    on_before_backward: tuple[Hook, ...]
    on_after_backward: tuple[Hook, ...]
    on_before_optimizer_step: tuple[Hook, ...]
    monitor_train_epoch_end: tuple[Hook, ...]

    def __init__(self, callbacks: Sequence[Callback], task: Task) -> None:
        ordinary = [callback for callback in callbacks if not callback.monitors]
        monitors = [callback for callback in callbacks if callback.monitors]
        for name in CALLBACK_HOOKS:
            watchers = [getattr(callback, name) for callback in ordinary if overrides(callback, name, Callback)]
            if name in TASK_HOOKS and overrides(task, name, Task):
                watchers.append(_without_trainer(getattr(task, name)))
            deciders = [getattr(callback, name) for callback in monitors if overrides(callback, name, Callback)]
            if name == "on_train_epoch_end":
                # Between the two, the loop reduces the metrics of the epoch.
                self.monitor_train_epoch_end = tuple(deciders)
                deciders = []
            setattr(self, name, (*watchers, *deciders))

    def of(self, name: str) -> tuple[Hook, ...]:
        """The hooks called `name`."""
        hooks: tuple[Hook, ...] = getattr(self, name)
        return hooks


def _without_trainer(method: Hook) -> Hook:
    return lambda _trainer, _task, *arguments: method(*arguments)  # pyright: ignore


def overrides(instance: object, name: str, base: type) -> bool:
    """Whether the instance has its own method `name`, not the one of `base`."""
    return getattr(type(instance), name, None) is not getattr(base, name) or name in vars(instance)


def check_hooks(instance: object, base: type) -> None:
    """Refuse methods that look as if they were called and are not, and those that can't take their arguments.

    Raises:
        TypeError: names the class, the method, and the nearest hook or the right signature.
    """
    kind = type(instance)
    check_names(kind, base)
    for name, method in methods_of(kind, base):
        definition = getattr(base, name, None)
        if definition is not None:
            if inspect.isfunction(definition):
                _check_arguments(kind, name, method, definition)
        elif name.startswith("on_"):
            near = get_close_matches(name, _hook_names(base), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the hooks are the `on_…` methods of {base.__name__}."
            raise TypeError(
                f"{kind.__name__}.{name} is no hook, so it would never be called: {hint} "
                "A method that is not meant as a hook needs a name without `on_`."
            )


def check_takes_all_arguments(instance: object, name: str, base: type) -> None:
    """Refuse a hook that leaves out `dataloader_idx`, where there are several loaders and it is given.

    Raises:
        TypeError: names the class, the hook and the right signature.
    """
    method, definition = getattr(type(instance), name), getattr(base, name)
    if method is definition or not inspect.isfunction(method):
        return
    if not _binds(inspect.signature(method), len(inspect.signature(definition).parameters)):
        raise _wrong_signature(type(instance), name, method, definition)


def check_logger(logger: Logger) -> None:
    """Refuse a logger that lacks `log_metrics`, or can't take what its methods are called with.

    Raises:
        TypeError: names the class, the method and the right signature.
    """
    kind = type(logger)
    if kind.log_metrics is Logger.log_metrics:
        raise TypeError(f"{kind.__name__} has no log_metrics(metrics, step), which a Logger must have.")
    for name, keywords in (("log_metrics", {"step": None}), ("log_hyperparams", {}), ("finalize", {})):
        method = getattr(kind, name)
        try:
            inspect.signature(method).bind(None, None, **keywords)
        except TypeError:
            raise _wrong_signature(kind, name, method, getattr(Logger, name)) from None


def _wrong_signature(kind: type, name: str, method: Hook, definition: Hook) -> TypeError:
    expected = ", ".join(inspect.signature(definition).parameters)
    return TypeError(
        f"{kind.__name__}.{name}{inspect.signature(method)} can't take the arguments it is called with: expected "
        f"({expected})."
    )


# Methods of a task that the trainer calls, besides hooks; always with all their arguments.
_CALLED = (
    "setup", "teardown", "prepare_data", "configure_optimizers", "configure_model", "configure_callbacks",
    "configure_gradient_clipping", "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    "transfer_batch_to_device", "state_dict", "load_state_dict", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip


def _check_arguments(kind: type, name: str, method: Hook, definition: Hook) -> None:
    expected = [
        parameter
        for parameter in inspect.signature(definition).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    most = least = len(expected)
    if name in STEPS:
        # The index may be left out; the loader's is given only where there are several.
        most, least = (3 if name == "training_step" else 4), 2
    elif name.startswith("on_"):  # here, too
        least = sum(parameter.default is parameter.empty for parameter in expected)
    elif name not in _CALLED:
        return
    signature = inspect.signature(method)
    if "optimizer_idx" in signature.parameters:
        raise TypeError(
            f"{kind.__name__}.{name}{signature} takes optimizer_idx, which is never given: with several optimizers set "
            "self.automatic_optimization = False, and step them in training_step."
        )
    if not any(_binds(signature, count) for count in range(least, most + 1)):
        raise _wrong_signature(kind, name, method, definition)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
