"""Methods that nobody would call: Lightning's former names, and near misses of the names there are.

A method of the user's own must pass whatever it is called. So a near miss is refused only where the right method is
missing, and where the arguments are those of the right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import FunctionType
from typing import Any

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")

# How alike a misspelt name is at least, from 0 to 1: about one letter in ten is wrong.
_ALIKE = 0.9

_BY_HAND = "do it at the end of the step: a rank's step sees its whole batch"
FORMER = {
    "training_epoch_end": "on_train_epoch_end(self), with what training_step kept in an attribute",
    "validation_epoch_end": "on_validation_epoch_end(self), with what validation_step kept in an attribute",
    "test_epoch_end": "on_test_epoch_end(self), with what test_step kept in an attribute",
    "training_step_end": _BY_HAND,
    "validation_step_end": _BY_HAND,
    "test_step_end": _BY_HAND,
    "configure_sharded_model": "configure_model(self)",
    "configure_ddp": "Trainer(strategy=DDPStrategy(…))",
    "configure_sync_batchnorm": "DDPStrategy(sync_batchnorm=True)",
    "init_ddp_connection": "a Strategy of your own",
    "get_progress_bar_dict": "self.log(…, prog_bar=True)",
    "tbptt_split_batch": "split the batch in training_step, with automatic_optimization = False",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_configure_sharded_model": "configure_model of the task",
    "on_before_accelerator_backend_setup": "setup",
    "on_post_move_to_device": "on_fit_start",
    "on_keyboard_interrupt": "on_exception of a callback",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
}
"""Methods that Lightning called once, and what stands in their place."""

_OTHER_WORDS = {
    "train_step": "training_step",
    "val_step": "validation_step",
    "valid_step": "validation_step",
    "prediction_step": "predict_step",
    "training_dataloader": "train_dataloader",
    "validation_dataloader": "val_dataloader",
    "valid_dataloader": "val_dataloader",
    "prediction_dataloader": "predict_dataloader",
}
# Whose misspelling is quiet, or hard to see. `prepare_data`, `setup` and `configure_model` are missed at once, and have
# neighbours (`prepared_data`, `configure_models`) that are good names for helpers.
_CHECKED = (
    *STEPS, *LOADERS, "configure_optimizers", "configure_callbacks", "configure_gradient_clipping", "optimizer_step",
    "optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device",
)  # fmt: skip
_ENDS_OF_HOOKS = ("_epoch_start", "_epoch_end", "_batch_start", "_batch_end")


def methods_of(kind: type, base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of `kind` that `base` has not, by name; static and class methods are none."""
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if isinstance(method, FunctionType) and method is not inspect.getattr_static(base, name, None):
            yield name, method


def check_names(kind: type, base: type) -> None:
    """Refuse methods of a task, data module or callback that look as if the trainer called them, and it does not.

    Raises:
        TypeError: names the class, the method, and what to write instead.
    """
    for name, method in methods_of(kind, base):
        if name in FORMER and not hasattr(base, name) and (name.startswith("on_") or hasattr(base, "training_step")):
            raise TypeError(f"{kind.__name__}.{name} would never be called. Instead: {FORMER[name]}.")
        meant = _meant_by(name, method, kind, base)
        if meant is not None:
            raise TypeError(
                f"{kind.__name__}.{name} would never be called: did you mean {meant!r}? A helper needs another name."
            )


def _meant_by(name: str, method: Callable[..., Any], kind: type, base: type) -> str | None:
    """The method of `base` that was meant by one that only looks like it, if any."""
    if name.startswith("_") or hasattr(base, name):
        return None
    missing = [right for right in dir(base) if getattr(kind, right) is getattr(base, right)]
    if f"on_{name}" in missing and name.endswith(_ENDS_OF_HOOKS):
        right = f"on_{name}"
    elif name in _OTHER_WORDS:
        right = _OTHER_WORDS[name]
    else:
        right = next(iter(get_close_matches(name, [r for r in _CHECKED if r in missing], 1, _ALIKE)), "")
    return right if right in missing and _takes_the_same(method, getattr(base, right), right) else None


def _takes_the_same(method: Callable[..., Any], definition: Callable[..., Any], right: str) -> bool:
    """Whether the method was written for the arguments of the right one."""
    mine, theirs = _positional(method), _positional(definition)
    if right in STEPS:
        return mine == ["batch"] or (len(mine) > 1 and ("idx" in mine[1] or "index" in mine[1]))
    return len(mine) == len(theirs) and mine[:1] == theirs[:1]


def _positional(method: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
