"""The learning rate of a run: scaled to the global batch, warmed up, and brought down at the end."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def scaled_lr(base_lr: float, base_batch: int, global_batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """The learning rate for a global batch, from one that was found good for another.

    "linear": in proportion to the batch (Goyal et al. 2017, "Accurate, Large Minibatch SGD", who warm up to it);
    for SGD. "sqrt": to its square root, which keeps the variance of an update (Krizhevsky 2014, "One weird trick for
    parallelizing convolutional neural networks"); also for Adam (Malladi et al. 2022, "On the SDEs and Scaling Rules
    for Adaptive Gradient Algorithms").

    Args:
        base_lr: the rate that is good at `base_batch`.
        base_batch: samples of a step.
        global_batch: samples of a step here: `trainer.global_batch_size`, in `configure_optimizers`.
        rule: "linear" or "sqrt".

    Raises:
        ValueError: a number is not above 0, or there is no such rule.
    """
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("global_batch", global_batch)):
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"scaled_lr({name}={value!r}): expected a number above 0.")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"scaled_lr(rule={rule!r}): expected 'linear' or 'sqrt'.")
    ratio = global_batch / base_batch
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


def warmup_schedule(
    optimizer: Optimizer,
    warmup: int | float,
    total_steps: float,
    decay: Literal["cosine", "linear"] = "cosine",
    final_ratio: float = 0.0,
) -> LambdaLR:
    """Up in a straight line, then down along half a cosine (Loshchilov & Hutter 2017, "SGDR") or a straight line.

    In units of each group's own rate, step t (from 0) takes, with w steps of warm-up and T in all,

        (t + 1) / (w + 1)                            t < w:       no step is taken at 0
        final_ratio + (1 - final_ratio) · d(p)       w ≤ t < T:   p = (t - w) / (T - w);  step w takes the full rate
        final_ratio                                  t ≥ T

    with d(p) = (1 + cos πp) / 2 or 1 - p. Each rate is computed from t alone, never from the rate before: it is the
    same after a resume, to the bit. A checkpoint keeps t, and the groups' rates; warm-up and length are those of the
    program that resumes.

    Args:
        optimizer: its groups' `lr` is what the factor multiplies.
        warmup: steps (int) below the full rate; or a share of all, from 0.0 to below 1.0 (float), rounded down.
        total_steps: in the whole fit: `trainer.estimated_stepping_batches`.
        decay: "cosine" or "linear".
        final_ratio: where it ends, from 0.0 to 1.0. With 1.0 the rate stays after the warm-up.

    Returns:
        A scheduler to be stepped with `interval="step"`.

    Raises:
        ValueError: a run without end, a warm-up that leaves no step at the full rate, or a number out of range.
    """
    if not _is_number(total_steps) or total_steps != total_steps // 1 or total_steps < 1:
        raise ValueError(
            f"warmup_schedule(total_steps={total_steps!r}): expected a whole number of 1 or more. A run without end has "
            "none: set max_epochs or max_steps."
        )
    if not _is_number(warmup) or not warmup >= 0 or (isinstance(warmup, float) and warmup >= 1):
        raise ValueError(
            f"warmup_schedule(warmup={warmup!r}): expected a number of steps (int), or a share of them, from 0.0 to below "
            "1.0 (float)."
        )
    if isinstance(warmup, int) and warmup >= total_steps:
        raise ValueError(
            f"warmup_schedule(warmup={warmup}, total_steps={int(total_steps)}): no step would be left at the full rate. "
            "Expected a shorter warm-up, or a share (0.1)."
        )
    if decay not in ("cosine", "linear"):
        raise ValueError(f"warmup_schedule(decay={decay!r}): expected 'cosine' or 'linear'.")
    if not _is_number(final_ratio) or not 0 <= final_ratio <= 1:
        raise ValueError(f"warmup_schedule(final_ratio={final_ratio!r}): expected a number from 0.0 to 1.0.")
    below = warmup if isinstance(warmup, int) else int(warmup * total_steps)

    def factor(step: int) -> float:
        if step < below:
            return (step + 1) / (below + 1)
        done = min(1.0, (step - below) / (total_steps - below))
        left = (1 + math.cos(math.pi * done)) / 2 if decay == "cosine" else 1 - done
        return final_ratio + (1 - final_ratio) * left

    return LambdaLR(optimizer, factor)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
