"""DistributedDataParallel: every rank holds the model, computes on its share, and takes the same step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors  # pyright: ignore
from torch.optim import Optimizer

from . import process_groups
from .base import Pending, Strategy
from .environment import Environment
from .precision import Precision
from .same_model import check_same_model, check_same_parameters

T = TypeVar("T")
_NOTHING = nullcontext()
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Small tensors travel together, up to this many elements a bundle.
_BUNDLE_ELEMENTS = 1 << 20


class DDPStrategy(Strategy):
    """PyTorch's DistributedDataParallel, on gloo (CPU) or NCCL (CUDA).

    Args:
        timeout: how long a rank waits for the others in one collective before it fails.
        find_unused_parameters: let parameters go without a gradient in some steps. Costs a walk over the
            autograd graph in every step, and the buckets never adapt to the order of the backward.
            Manual optimization turns it on, since each of its backwards reaches only some parameters.
        gradient_as_bucket_view: gradients are views into the communication buckets, which saves a copy
            of all gradients. Clone a `.grad` before you keep it: the next backward overwrites it.
        bucket_cap_mb: size of a communication bucket in MiB. None: torch's 25, with a first bucket of 1.
        sync_batchnorm: convert BatchNorm layers to torch's SyncBatchNorm (CUDA only, for now).
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        *,
        timeout: timedelta = timedelta(minutes=10),
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: expected MiB above 0, or None for torch's default.")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout}: expected a timedelta above 0.")
        self.timeout = timeout
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self.sync_batchnorm = sync_batchnorm
        self.model: DistributedDataParallel | None = None
        self.collectives: Counter[str] = Counter()
        self._manual = False
        self._groups: process_groups.ProcessGroups | None = None

    # --- the life of a run -----------------------------------------------------------------

    def place(self, environment: Environment, device: torch.device, precision: Precision) -> None:
        """Take the place; refuse a SyncBatchNorm that torch would refuse in the middle of the run."""
        if self.sync_batchnorm and device.type != "cuda" and environment.world_size > 1:
            raise ValueError(
                f"sync_batchnorm=True on {device.type} is not supported yet: torch's SyncBatchNorm works on CUDA "
                "only. Leave it out (each rank then normalizes over its own micro-batch), or use GPUs."
            )
        super().place(environment, device, precision)

    def setup(self) -> None:
        """Join the process groups of the job."""
        super().setup()
        self._groups = process_groups.join(self.environment, self.device, self.timeout)

    def teardown(self) -> None:
        """Drop the DDP wrapper, and with it the hooks it set on the parameters."""
        self.model = None

    def wrap(self, step: nn.Module, *, manual: bool = False) -> Callable[..., Any]:
        """Wrap in DistributedDataParallel, after a check that all ranks hold the same model."""
        if any(isinstance(module, DistributedDataParallel) for module in step.modules()):
            raise ValueError(
                "the task holds a DistributedDataParallel already: give the plain module, DDPStrategy wraps it."
            )
        check_same_model(step, self.gather_objects)
        if not any(parameter.requires_grad for parameter in step.parameters()):
            self.broadcast_module(step)  # nothing to reduce: DDP refuses such a module
            return step.forward
        if self.sync_batchnorm and self.world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(step, self.groups.training)
        self._manual = manual
        self.model = DistributedDataParallel(
            step,
            process_group=self.groups.training,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters or manual,
        )
        return self._manual_step if manual else self.model

    def check_same_parameters(self, module: nn.Module) -> None:
        """Compare the parameters' sums over the ranks; see `same_model.check_same_parameters`."""
        check_same_parameters(module, self.all_gather)

    @contextmanager
    def patience(self) -> Generator[None]:
        """Wait for a day in the collectives inside: others may be downloading. A rank that dies is seen at once."""
        set_timeout: Any = dist.distributed_c10d._set_pg_timeout  # pyright: ignore[reportPrivateUsage]
        set_timeout(timedelta(days=1), self.groups.control)
        try:
            yield
        finally:
            set_timeout(self.timeout, self.groups.control)

    def describe(self) -> dict[str, str]:
        """Backend, and the communication buckets as DDP lays them out before the first step."""
        lines = {"backend": "nccl" if self.device.type == "cuda" else "gloo"}
        if self.model is not None:
            data: dict[str, Any] = self.model._get_ddp_logging_data()  # pyright: ignore
            sizes = [int(size) for size in str(data.get("bucket_sizes", "")).split(",") if size.strip()]
            cap = self.bucket_cap_mb or 25
            lines["buckets"] = f"{len(sizes)} ({sum(sizes) / 2**20:.2f} MiB; cap {cap:g} MiB)"
        return lines

    # --- one step --------------------------------------------------------------------------

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """DDP decides in forward whether the backward will reduce: forward must be inside, too."""
        if enabled or self.model is None:
            return _NOTHING
        return self.model.no_sync()

    def _manual_step(self, *args: Any) -> Any:
        # `training_step` runs its backwards before DDP.forward returns, so DDP must not wait for one
        # afterwards; `backward` arms the reducer instead. Buffers are still broadcast in forward.
        assert self.model is not None
        self.model.require_backward_grad_sync = False
        self.model.require_forward_param_sync = True
        try:
            return self.model(*args)
        finally:
            self.model.require_backward_grad_sync = True

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward, with the reduction of the gradients over the ranks inside it."""
        if self._manual and self.model is not None:
            tensors: list[Tensor] = list(_find_tensors(loss))  # pyright: ignore[reportUnknownArgumentType]
            self.model.reducer.prepare_for_backward(tensors)
        loss.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, after a check that every gradient was reduced: DDP itself says so in the next forward, too late."""
        if self.model is not None and not self._manual:
            self._check_reduced(self.model)
        return super().optimizer_step(optimizer)

    def _check_reduced(self, model: DistributedDataParallel) -> None:
        try:
            # The first thing it does is to see whether the last reduction was finished. The rebuilding itself, once in
            # a run, would be done at the start of the next forward.
            if model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True  # pyright: ignore[reportPrivateUsage]
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            # torch's message has indices. (Whether `.grad` is None says nothing: with views into the bucket it is not.)
            named = cast("Iterable[tuple[str, nn.Parameter]]", model.module.named_parameters())
            trainable = [name.removeprefix("task.") for name, parameter in named if parameter.requires_grad]
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = ", ".join(trainable[int(index)] for index in found[1].split()) if found else "(torch does not say)"
            raise RuntimeError(
                f"rank {self.rank}: the loss did not depend on these parameters in this step: {names}. The other ranks would "
                "wait for their gradients. If that is meant, use DDPStrategy(find_unused_parameters=True); if they are "
                "never used, remove or freeze them (requires_grad_(False))."
            ) from error

    # --- collectives -----------------------------------------------------------------------

    @property
    def groups(self) -> process_groups.ProcessGroups:
        """The process groups, joined by `setup`."""
        if self._groups is None:
            raise RuntimeError("the ranks have not met yet: collectives work inside fit, validate, test and predict.")
        return self._groups

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup:
        return self.groups.training if tensor.is_cuda else self.groups.control

    @contextmanager
    def _named(self, name: str) -> Generator[None]:
        self.collectives[name] += 1
        self.groups.announce(name)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} could not finish the collective {name!r} with the other "
                f"{self.world_size - 1}: one of them has ended or did not come. Its own message says why. ({error})"
            ) from error

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, name: str) -> Tensor:
        """Reduce over the ranks in place."""
        with self._named(name):
            dist.all_reduce(tensor, _OPERATIONS[op], group=self._group_of(tensor))
        return tensor

    def start_all_reduce_max(self, tensor: Tensor, *, name: str) -> Pending:
        """Start the maximum on the control group, where it waits behind no gradient."""
        with self._named(name):
            return Pending(tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, self.groups.control, async_op=True))

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Gather over the ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._named(name):
            dist.all_gather(parts, tensor.contiguous(), group=self._group_of(tensor))
        return torch.stack(parts)

    def gather_objects(self, value: T, *, name: str) -> list[T]:
        """Gather pickled objects on the control group."""
        values: list[Any] = [None] * self.world_size
        with self._named(name):
            dist.all_gather_object(values, value, group=self.groups.control)
        return values

    def broadcast(self, value: T, *, name: str = "broadcast") -> T:
        """Broadcast a pickled object on the control group."""
        values = [value]
        with self._named(name):
            dist.broadcast_object_list(values, src=0, group=self.groups.control)
        return values[0]

    def barrier(self, *, name: str = "barrier") -> None:
        """Wait for all ranks on the control group: the device is not touched."""
        with self._named(name):
            dist.barrier(group=self.groups.control)

    def broadcast_tensors(self, tensors: Iterable[Tensor], *, name: str) -> None:
        """Broadcast rank 0's values, small tensors of one type and device bundled into one message."""
        bundles: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
        for tensor in tensors:
            lists = bundles.setdefault((tensor.dtype, tensor.device), [[]])
            if lists[-1] and sum(t.numel() for t in lists[-1]) + tensor.numel() > _BUNDLE_ELEMENTS:
                lists.append([])
            lists[-1].append(tensor)
        for bundle in (bundle for lists in bundles.values() for bundle in lists):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bundle])
            with self._named(name):
                dist.broadcast(flat, src=0, group=self._group_of(flat))
            with torch.no_grad():
                for tensor, part in zip(
                    bundle, cast("tuple[Tensor, ...]", flat.split([t.numel() for t in bundle])), strict=True
                ):
                    tensor.copy_(part.view_as(tensor))
