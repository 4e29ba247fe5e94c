"""What users may give as `comm_hook`, as a `CommHook`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .codecs import BF16, FP16, Int8
from .compressed import Compressed
from .hierarchical import Hierarchical
from .hook import CommHook
from .local_sgd import PostLocalSGD
from .powersgd import PowerSGD

NAMES: dict[str, Callable[[], CommHook]] = {
    "fp16": lambda: Compressed(FP16()),
    "bf16": lambda: Compressed(BF16()),
    "quantize8": lambda: Compressed(Int8()),
    "powersgd": PowerSGD,
    "post_local_sgd": PostLocalSGD,
    "hierarchical": Hierarchical,
}


def resolve(comm_hook: str | CommHook | Callable[..., Any] | None, state: Any = None) -> CommHook | None:
    """Return the hook that is meant.

    Args:
        comm_hook: None; one of the names in `NAMES`; a `CommHook`; or a function
            `(state, bucket) -> Future[Tensor]` as torch's, `functools.partial` and callable objects included.
        state: the function's first argument.

    Raises:
        ValueError: there is no such name, or a state comes without a function.
        TypeError: none of these.
    """
    function = callable(comm_hook) and not isinstance(comm_hook, (CommHook, type))
    if state is not None and not function:
        raise ValueError(
            f"a state for comm_hook={comm_hook!r}: expected None, since only a function (state, bucket) takes one."
        )
    if comm_hook is None or isinstance(comm_hook, CommHook):
        return comm_hook
    if isinstance(comm_hook, str):
        if comm_hook in NAMES:
            return NAMES[comm_hook]()
        nearest = difflib.get_close_matches(comm_hook.lower(), NAMES, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"comm_hook={comm_hook!r}: expected one of {', '.join(NAMES)}, a CommHook, or a function (state, bucket).{hint}"
        )
    if not function:
        what = f"the class {comm_hook.__name__}" if isinstance(comm_hook, type) else f"{type(comm_hook).__name__}"
        raise TypeError(
            f"comm_hook is {what}: expected a name ({', '.join(NAMES)}), a CommHook object, or a function (state, bucket)."
        )
    try:
        inspect.signature(comm_hook).bind(state, None)
    except TypeError:
        raise TypeError(f"comm_hook={comm_hook!r} can't be called with (state, bucket).") from None
    except ValueError:  # built in, without a signature
        pass
    return FunctionHook(comm_hook, state)


class FunctionHook(CommHook):
    """A function `(state, bucket) -> Future[Tensor]`, as torch's own hooks. Its state is not saved."""

    def __init__(self, function: Callable[..., Any], state: Any = None) -> None:
        self.function, self.state = function, state

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Call it, and look at what it returns: DDP's own message about a Tensor is hard to read."""
        future: Any = self.function(self.state, bucket)
        if not isinstance(future, torch._C.Future):  # pyright: ignore[reportPrivateUsage]
            raise TypeError(
                f"the comm hook {self.function!r} returned {type(future).__name__}: expected a torch.futures.Future of the "
                "mean. Return `dist.all_reduce(…, async_op=True).get_future().then(…)`; or, where the tensor is there "
                "already, `future = torch.futures.Future(); future.set_result(tensor); return future`."
            )
        expected = bucket.buffer().dtype

        def single(done: torch.futures.Future[Any]) -> Tensor:
            value = done.value()
            if isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) == 1:
                value = cast("list[Any]", value)[0]  # what an asynchronous all_reduce gives
            if not isinstance(value, Tensor) or value.dtype != expected:
                what = value.dtype if isinstance(value, Tensor) else type(cast("object", value)).__name__
                raise TypeError(
                    f"the comm hook {self.function!r} gave a future of {what}: expected a tensor of {expected}, the mean of "
                    "bucket.buffer()."
                )
            return value

        return cast("torch.futures.Future[Any]", future).then(single)
