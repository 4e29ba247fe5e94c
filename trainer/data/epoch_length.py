"""How many batches an epoch has: what the ranks agree on before it begins, so that none waits for more than there are."""

from __future__ import annotations

from typing import Literal

from ...strategies.base import Strategy
from .prepared import PreparedLoader
from .sampling import check_same_order

Uneven = Literal["stop", "join"]


def uneven_policy(loader: PreparedLoader, strategy: Strategy) -> Uneven | None:
    """What happens when the training loaders end apart; None: they can't, or must not. All ranks call it."""
    unsized = strategy.gather_objects(loader.length is None, name="which loaders have a length")
    if strategy.world_size == 1 or strategy.uneven_inputs == "error":
        return None
    return strategy.uneven_inputs or ("stop" if any(unsized) else None)


def epoch_length(
    loader: PreparedLoader, strategy: Strategy, uneven: Uneven | None, order: str | None = None
) -> int | None:
    """Batches of the epoch on every rank: of the one that ends first or last, where they may end apart.

    Args:
        loader: of this rank. All ranks call it.
        strategy: carries the lengths.
        uneven: as `uneven_policy` said.
        order: `order_digest` of the epoch that begins, which all ranks must share.

    Returns:
        None where it can't be known.

    Raises:
        RuntimeError: on every rank, with all lengths: they differ, and nothing says what to do then.
    """
    told = strategy.gather_objects((loader.length, order), name="lengths of the training loader")
    lengths, orders = (list(values) for values in zip(*told, strict=True))
    check_same_order(orders, "training")
    known = [length for length in lengths if length is not None]
    if uneven is not None:
        return None if len(known) < len(lengths) else max(known) if uneven == "join" else min(known)
    if len(set(lengths)) > 1:
        each = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise RuntimeError(
            f"the training loader's length differs ({each} batches), so the longer ranks would wait for the shorter: "
            "expected the same on every rank. Deal the samples evenly, set limit_train_batches="
            f"{min(known)}, or choose DDPStrategy(uneven_inputs='stop') or 'join'."
            if len(known) == len(lengths)
            else f"the training loader has a length on some ranks only ({each}): expected it on all."
        )
    return lengths[0]
