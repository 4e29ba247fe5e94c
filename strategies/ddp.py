"""DistributedDataParallel: every rank holds the model, computes on its share, and takes the same step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors  # pyright: ignore
from torch.optim import Optimizer

from . import comm_hooks, sync_batchnorm
from .base import UnevenInputs
from .compiled import CompileOrder, CountedCompile, check_options
from .ddp_arguments import COMPILE_ORDERS, UNEVEN_INPUTS, DDPArguments, one_of, refuse_pairs
from .environment import Environment
from .fused import is_fused
from .manual_backward import OurBackwards
from .optimizer_in_backward import OptimizerInBackward
from .precision import Precision
from .process_group_strategy import ProcessGroupStrategy
from .ready_order import ReadyOrder
from .same_model import check_same_model
from .used_parameters import UsedParameters, check_reduced

_NOTHING = nullcontext()


class DDPStrategy(ProcessGroupStrategy):
    """PyTorch's DistributedDataParallel, on gloo (CPU) or NCCL (CUDA).

    Pairs of levers that can't go together are refused, here or when the Trainer is built; docs/ddp-matrix.md shows all.

    Args:
        timeout: how long a rank waits for the others in one collective before it fails, once the first step is done.
        startup_timeout: the same until then: other ranks may be building a model or compiling. Default: 30 minutes,
            or `timeout` where that is longer.
        bucket_cap_mb: size of a communication bucket in MiB. None: torch's 25, with a first bucket of 1, which goes off
            early. Smaller ones overlap better with the backward, larger ones lose less time to latency.
        bucket_cap_mb_list: MiB of the first, second, … bucket; the last number stands for the rest.
        gradient_as_bucket_view: gradients are views into the communication buckets, which saves a copy and the memory
            of all gradients. Clone a `.grad` before you keep it: the next backward overwrites it.
        static_graph: every step uses the same parameters in the same way. Unused ones are found once, and reentrant
            checkpoints work. torch fails where it is not true. With accumulation, each micro-batch of the first step
            is reduced: torch learns the graph there.
        find_unused_parameters: let parameters go without a gradient in some steps, or on some ranks. Costs a walk over
            the autograd graph in every step, and the buckets never adapt to the order of the backward. Manual
            optimization turns it on, since each of its backwards reaches only some parameters.
        forward_sync_buffers: broadcast rank 0's buffers (BatchNorm's running statistics) before each forward. False saves
            that message; before an evaluation and a checkpoint all ranks get rank 0's either way.
        init_sync: broadcast rank 0's parameters and buffers when the model is wrapped. False saves that for large models
            that are equal already, which is checked by their sums.
        batched_grad_copy: copy the gradients into the buckets in one kernel (torch 2.13), for many small parameters.
        device_mesh: a one-dimensional mesh of all ranks, in place of our process group.
        sync_batchnorm: normalize over the batches of all ranks: torch's SyncBatchNorm on CUDA, ours elsewhere. Two
            collectives for each layer and step.
        compile: "before_ddp" compiles the task's step and wraps that, "after_ddp" compiles the wrapped one. Both split the
            graph at the buckets, so that communication overlaps; checkpoints hold the same names as without.
        compile_options: arguments of `torch.compile`, such as `{"mode": "max-autotune"}` or `{"backend": "aot_eager"}`.
        comm_hook: how gradients are reduced: a name ("fp16", "bf16", "quantize8", "powersgd", "post_local_sgd",
            "hierarchical"), an object of `strategies.comm_hooks`, or a function `(state, bucket) -> Future[Tensor]`.
        comm_hook_state: the first argument of that function.
        uneven_inputs: when the ranks' training loaders don't end together: "error" (default for loaders with a length)
            compares the lengths at each epoch's start; "stop" (default for those without) ends the epoch with the
            first that ends; "join" goes on until all have ended, a rank without data taking part in each step with
            a gradient of zero. So optimizers, schedulers and hooks are the same on all ranks at all times.
        uneven_divisor: "active": the gradient is the mean over the micro-batches that are there; "initial": those that are
            missing count as zero, as in torch's Join by default.
        fused_optimizer: "auto": torch's fused kernels, where device, type and optimizer allow; True: or an error.
        optimizer_in_backward: update each bucket's parameters as its reduction ends, while the backward goes on.
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        *,
        timeout: timedelta = timedelta(minutes=10),
        startup_timeout: timedelta | None = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool = True,
        init_sync: bool = True,
        batched_grad_copy: bool = False,
        device_mesh: Any = None,
        sync_batchnorm: bool = False,
        compile: CompileOrder = "off",
        compile_options: Mapping[str, Any] | None = None,
        comm_hook: str | comm_hooks.CommHook | Callable[..., Any] | None = None,
        comm_hook_state: Any = None,
        uneven_inputs: UnevenInputs | None = None,
        uneven_divisor: Literal["active", "initial"] = "active",
        fused_optimizer: bool | Literal["auto"] = "auto",
        optimizer_in_backward: bool = False,
    ) -> None:
        super().__init__(timeout=timeout, startup_timeout=startup_timeout)
        one_of("compile", compile, COMPILE_ORDERS)
        one_of("uneven_divisor", uneven_divisor, ("active", "initial"))
        if uneven_inputs is not None:
            one_of("uneven_inputs", uneven_inputs, UNEVEN_INPUTS)
        if fused_optimizer not in (True, False, "auto"):
            raise ValueError(f"fused_optimizer={fused_optimizer!r}: expected True, False or 'auto'.")
        for name, value in (("sync_batchnorm", sync_batchnorm), ("optimizer_in_backward", optimizer_in_backward)):
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{name}={value!r}: expected True or False.")
        if compile_options is not None and not isinstance(compile_options, Mapping):  # pyright: ignore
            raise ValueError(f"compile_options={compile_options!r}: expected a dict of torch.compile's arguments.")
        if uneven_divisor == "initial" and uneven_inputs != "join":
            raise ValueError("uneven_divisor='initial' without uneven_inputs='join': nothing would be missing.")
        if compile_options and compile == "off":
            raise ValueError(
                "compile_options without compile: say compile='before_ddp' or 'after_ddp', or leave them out."
            )
        check_options(compile_options or {})
        caps = None if bucket_cap_mb_list is None else tuple(bucket_cap_mb_list)
        self.arguments = DDPArguments(
            bucket_cap_mb, caps, gradient_as_bucket_view, static_graph, find_unused_parameters, forward_sync_buffers,
            init_sync, batched_grad_copy, device_mesh,
        )  # fmt: skip
        self.sync_batchnorm = sync_batchnorm
        self.compile, self.compile_options = compile, dict(compile_options or {})
        self.compiles = compile != "off"
        self.comm_hook = comm_hooks.resolve(comm_hook, comm_hook_state)
        self.uneven_inputs, self.uneven_divisor = uneven_inputs, uneven_divisor
        self.fused_optimizer, self.optimizer_in_backward = fused_optimizer, optimizer_in_backward
        refuse_pairs(self._pairs())
        self.model: DistributedDataParallel | None = None
        self._step: nn.Module | None = None
        self._manual = False
        self._optimizers: list[Optimizer] = []
        self._in_backward: OptimizerInBackward | None = None
        self._compiled: CountedCompile | None = None
        self._hook_is_set_up = False
        self._used: UsedParameters | None = None
        self._ready_order: ReadyOrder | None = None
        # Of the run that is resumed, until a model it fits is wrapped, or a first step is taken.
        self._former_order: Mapping[str, Any] | None = None
        # Whether the first backwards have something to tell.
        self._learns = False
        self._batchnorm_group: dist.ProcessGroup | None = None
        self._our_backwards = OurBackwards()
        self._learns_graph = self._settled = False

    def _pairs(self) -> Iterable[tuple[bool, str, str, str]]:
        arguments, local = self.arguments, self.comm_hook is not None and self.comm_hook.ranks_differ
        joins, in_backward = self.uneven_inputs == "join", self.optimizer_in_backward
        largest = max(arguments.bucket_cap_mb_list or (arguments.bucket_cap_mb or 25,))
        return (
            (self.compile != "off" and largest < 1, "compile", f"buckets of {largest} MiB at most",
             "torch splits the compiled graph at the buckets, and expects its first, of 1 MiB, to be the smallest"),
            (self.compile == "after_ddp" and bool(self.compile_options.get("fullgraph")), "compile='after_ddp'", "fullgraph",
             "DDP's own forward breaks the graph. Use compile='before_ddp'"),
            (joins and self.sync_batchnorm, "uneven_inputs='join'", "sync_batchnorm",
             "a rank without data runs no BatchNorm, and the others would wait for it. Use uneven_inputs='stop'"),
            (joins and arguments.static_graph, "uneven_inputs='join'", "static_graph",
             "a rank without data has another graph. Use uneven_inputs='stop'"),
            (joins and local, "uneven_inputs='join'", "comm_hook='post_local_sgd'",
             "a rank without data would average in weights that have seen none. Use uneven_inputs='stop'"),
            (in_backward and arguments.find_unused_parameters, "optimizer_in_backward", "find_unused_parameters",
             "a parameter without any gradient would be updated with zeros (weight decay, momentum)"),
            (in_backward and not arguments.gradient_as_bucket_view, "optimizer_in_backward", "gradient_as_bucket_view=False",
             "the update reads the reduced gradients from the bucket"),
            (in_backward and local, "optimizer_in_backward", "comm_hook='post_local_sgd'",
             "the parameters are averaged between steps"),
        )  # fmt: skip

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether a parameter may go without a gradient in a step."""
        return self.arguments.find_unused_parameters

    @property
    def graphs(self) -> int:
        """How many graphs `compile` has made in this fit: one for each bucket, and for each kind of input."""
        return 0 if self._compiled is None else self._compiled.graphs

    # --- the life of a run -----------------------------------------------------------------

    def place(self, environment: Environment, device: torch.device, precision: Precision) -> None:
        """Take the place; refuse what the precision excludes."""
        local = self.comm_hook is not None and self.comm_hook.ranks_differ
        refuse_pairs((
            (self.optimizer_in_backward and precision.scales_loss, "optimizer_in_backward", f"precision={precision.name!r}",
             "the scaler must see all gradients before it knows whether the step is taken. Use bf16-mixed"),
            (local and precision.scales_loss, "comm_hook='post_local_sgd'", f"precision={precision.name!r}",
             "the ranks' gradients differ, and so would their decision to skip a step. Use bf16-mixed"),
        ))  # fmt: skip
        super().place(environment, device, precision)

    def check_step(self, *, accumulation: int, clip_limit: float | None, skips: bool = False) -> None:
        """Refuse what an update inside the backward can't wait for."""
        on, local = self.optimizer_in_backward, self.comm_hook is not None and self.comm_hook.ranks_differ
        refuse_pairs((
            (on and skips, "optimizer_in_backward", "skip_nonfinite",
             "the first parameters are updated before all gradients are known"),
            (local and skips, "comm_hook='post_local_sgd'", "skip_nonfinite",
             "the ranks' gradients differ, and so would their decision to skip a step"),
            (on and accumulation > 1, "optimizer_in_backward", f"accumulate_grad_batches={accumulation}",
             "each backward updates the parameters"),
            (on and clip_limit is not None, "optimizer_in_backward", f"gradient_clip_val={clip_limit}",
             "the norm is known when all gradients are, and the first parameters are updated before that"),
        ))  # fmt: skip

    def setup(self) -> None:
        """Join the process groups of the job."""
        before = self._groups
        super().setup()
        if self._groups is not before:  # those of an earlier job are gone, and what was made beside them
            self._batchnorm_group = None

    def check_weighted(self) -> None:
        """Refuse them where the gradients are used before the sum of the weights is known, or are not everybody's."""
        local = self.comm_hook is not None and self.comm_hook.ranks_differ
        why = "the sum of the weights over the ranks is known after the backward"
        refuse_pairs((
            (self.optimizer_in_backward, 'a loss with a "weight"', "optimizer_in_backward", why),
            (local, 'a loss with a "weight"', "comm_hook='post_local_sgd'", "each rank steps by its own gradients"),
        ))  # fmt: skip

    def teardown(self) -> None:
        """Drop the DDP wrapper, with the hooks it set on the parameters, and what was converted for it."""
        if self._step is not None:
            self.unwrap(self._step)
        if self.comm_hook is not None:
            self.comm_hook.teardown()
        self._optimizers, self._used, self._hook_is_set_up = [], None, False
        self._former_order = None

    def unwrap(self, step: nn.Module) -> None:
        """Give the step back as it was before `wrap`."""
        if self.sync_batchnorm:
            sync_batchnorm.revert(step)
        if self._compiled is not None:
            # What was compiled belongs to this wrapper; torch would keep it, and compile no more after eight of them.
            torch.compiler.reset()
        if self._ready_order is not None:
            self._ready_order.forget()
        self._step = self.model = self._in_backward = self._compiled = self._ready_order = None

    def prepare_optimizers(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Keep them for the panel, and for updates inside the backward."""
        super().prepare_optimizers(optimizers, module)
        self._optimizers = list(optimizers)

    def wrap(self, step: nn.Module, *, manual: bool = False) -> Callable[..., Any]:
        """Wrap in DistributedDataParallel, after a check that all ranks hold the same model."""
        if any(isinstance(module, DistributedDataParallel) for module in step.modules()):
            raise ValueError(
                "the task holds a DistributedDataParallel already: give the plain module, DDPStrategy wraps it."
            )
        if self._step is not None:
            self.unwrap(self._step)
        self._step = step
        arguments = self.arguments
        if manual:
            refuse_pairs((
                (on, lever, "automatic_optimization=False", why)
                for on, lever, why in (
                    (arguments.static_graph, "static_graph", "each of its backwards has another graph"),
                    (self.optimizer_in_backward, "optimizer_in_backward", "the task steps its optimizers by itself"),
                    (self.compile != "off", "compile", "its backwards run inside the step. Compile the networks in the task"),
                    (self.uneven_inputs == "join", "uneven_inputs='join'",
                     "how many backwards a step has is not known to a rank without data. Use 'stop'"),
                )
            ))  # fmt: skip
        mesh = arguments.device_mesh
        if mesh is not None and mesh.size() != self.world_size:
            raise ValueError(
                f"device_mesh holds {mesh.size()} of the run's {self.world_size} ranks: expected all of them, since each is "
                "dealt samples of its own."
            )
        _refuse_python_reducer()
        check_same_model(step, self.gather_objects)
        if self.sync_batchnorm and self.world_size > 1:
            sync_batchnorm.convert(
                step, self._group_of_batchnorm(), self.device.type, partial(self.named, announced=False)
            )
        if not any(parameter.requires_grad for parameter in step.parameters()):
            self.broadcast_module(step)  # nothing to reduce: DDP refuses such a module
            return step.forward
        if not arguments.init_sync:
            super().check_same_parameters(step, name="parameters to begin with")
        self._manual, self._settled = manual, False
        self._learns_graph = arguments.static_graph
        if self.compile == "before_ddp":
            self._compiled = CountedCompile(step, self.compile_options)
        _name_ignored(step)
        keywords = arguments.keywords(self.groups.training)
        if manual:
            keywords["find_unused_parameters"] = True
        self.model = DistributedDataParallel(step, **keywords)
        if self.compile == "after_ddp":
            self._compiled = CountedCompile(self.model, self.compile_options)
        if not manual and (arguments.static_graph or not arguments.find_unused_parameters):  # else buckets stay
            self._ready_order = ReadyOrder(self.model, static_graph=arguments.static_graph)
            self._lay_out_as_before(self._ready_order)
        self._register_hooks(step, self.model)
        self._used = None
        self._learns = self._ready_order is not None
        if not manual:
            self._learns = True
            self._used = UsedParameters(
                step,
                finds_unused=arguments.find_unused_parameters,
                static_graph=arguments.static_graph,
                ignored=cast("set[str]", self.model.parameters_to_ignore),
            )
        return self._manual_step if manual else self.model

    def _lay_out_as_before(self, order: ReadyOrder) -> None:
        """In a resumed run, bring the buckets to the layout they had. Before hooks are registered, which see nothing of it."""
        if self._former_order is not None and order.replay(self._former_order):
            self._former_order, self._learns_graph = None, False

    def _register_hooks(self, step: nn.Module, model: DistributedDataParallel) -> None:
        """How gradients are reduced, and what is updated behind it."""
        hook = self.comm_hook
        if hook is not None and not self._hook_is_set_up:  # set up anew it would forget its state
            self._hook_is_set_up = True
            context = comm_hooks.HookContext.create(step, self.environment, self.device, self.timeout)
            hook.setup(replace(context, names={key: name.removeprefix("task.") for key, name in context.names.items()}))
        if self.optimizer_in_backward:
            self._in_backward = OptimizerInBackward(self._optimizers[0], self._mean if hook is None else hook.reduce)
            comm_hooks.register(model, self._in_backward)
        elif hook is not None:
            comm_hooks.register(model, hook)

    def _group_of_batchnorm(self) -> dist.ProcessGroup:
        """A group for these layers alone: no control word, and no gradient, can come between their messages."""
        if self._batchnorm_group is None:
            self._batchnorm_group = cast("dist.ProcessGroup", dist.new_group(timeout=self.timeout))
        return self._batchnorm_group

    def check_same_parameters(self, module: nn.Module, *, name: str = "parameters of the epoch") -> None:
        """Compare them, unless a communication hook lets them differ for some steps."""
        if self.comm_hook is None or not self.comm_hook.ranks_differ:
            super().check_same_parameters(module, name=name)

    def synchronize(self, module: nn.Module) -> None:
        """Make parameters equal where a communication hook lets them differ, and give every rank rank 0's buffers."""
        if self.comm_hook is not None and self.comm_hook.ranks_differ:
            self.comm_hook.synchronize(module.parameters())
        super().synchronize(module)

    def options(self) -> dict[str, str]:
        """The levers."""
        hook = self.comm_hook
        return {
            **{name: repr(value) for name, value in vars(self.arguments).items() if name != "device_mesh"},
            "sync_batchnorm": repr(self.sync_batchnorm),
            "compile": self.compile,
            "comm_hook": "None" if hook is None else type(hook).__name__,
            "uneven_inputs": repr(self.uneven_inputs),
            "uneven_divisor": self.uneven_divisor,
            "fused_optimizer": repr(self.fused_optimizer),
            "optimizer_in_backward": repr(self.optimizer_in_backward),
        }

    def describe(self) -> dict[str, str]:
        """Backend, the communication buckets as DDP lays them out before the first step, and the levers that are on."""
        lines = {"backend": "nccl" if self.device.type == "cuda" else "gloo"}
        if self.model is not None:
            sizes = self._bucket_sizes(self.model)
            caps = self.arguments.bucket_cap_mb_list or (self.arguments.bucket_cap_mb or 25,)
            lines["buckets"] = (
                f"{len(sizes)} ({sum(sizes) / 2**20:.2f} MiB; cap {', '.join(f'{cap:g}' for cap in caps)} MiB)"
            )
        where = ", in backward" if self._in_backward is not None else ""
        for optimizer in self._optimizers:
            fused = ", fused" if is_fused(optimizer) else ""
            if fused or where:
                lines["optimizer"] = f"{type(optimizer).__name__}{fused}{where}"
        if self.comm_hook is not None:
            lines["gradients"] = f"reduced by {type(self.comm_hook).__name__}"
        if self.compile != "off":
            lines["compile"] = self.compile
        if self.uneven_inputs is not None:
            lines["uneven inputs"] = self.uneven_inputs
        return lines

    def exposed_communication(self) -> float | None:
        """As DDP measures it, in some steps: the reduction's time, less that in which the backward still computed."""
        if self.world_size == 1 or self.model is None:
            return super().exposed_communication()
        data: dict[str, Any] = self.model._get_ddp_logging_data()  # pyright: ignore
        whole, hidden = (data.get(f"avg_backward_{name}_time", 0) for name in ("comm", "compute_comm_overlap"))
        return max(0, whole - hidden) * 1e-9 if whole else None

    @staticmethod
    def _bucket_sizes(model: DistributedDataParallel) -> list[int]:
        """Bytes of each bucket."""
        data: dict[str, Any] = model._get_ddp_logging_data()  # pyright: ignore
        text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", ""))
        return [int(size) for size in text.split(",") if size.strip()]

    # --- one step --------------------------------------------------------------------------

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """DDP decides in forward whether the backward will reduce: forward must be inside, too."""
        # torch learns a static graph in the first backwards, and fails there unless they reduce. The mean stays right:
        # what is reduced already is equal on all ranks.
        if enabled or self.model is None or self._learns_graph:
            return _NOTHING
        return self.model.no_sync()

    def join(self, active: Sequence[int]) -> None:
        """Leave each rank its own buffers: rank 0's may be those of a rank without data."""
        super().join(active)
        if self.model is not None:
            self.model.require_forward_param_sync = len(active) == self.world_size

    def _manual_step(self, *args: Any) -> Any:
        # `training_step` runs its backwards before DDP.forward returns, so DDP must not wait for one
        # afterwards; `backward` arms the reducer instead. Buffers are still broadcast in forward.
        assert self.model is not None
        self.model.require_backward_grad_sync = False
        self.model.require_forward_param_sync = True
        try:
            if self._settled:
                return self.model(*args)
            with self._our_backwards.required(self.model) if self.world_size > 1 else _NOTHING:
                output = self.model(*args)
            self._settle()
            return output
        finally:
            self.model.require_backward_grad_sync = True

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward, with the reduction of the gradients over the ranks inside it."""
        model = self.model
        if model is not None and (self._manual or self._learns):
            self._before_backward(model, loss)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._our_backwards.running = True
        loss.backward(*args, **kwargs)  # not by way of super(): in every step a call is a call
        self._our_backwards.running = False

    def _before_backward(self, model: DistributedDataParallel, loss: Tensor) -> None:
        """Arm the reducer, which DDP's forward has not; or look at what the first loss depends on."""
        if self._manual:
            tensors: list[Tensor] = list(_find_tensors(loss))  # pyright: ignore[reportUnknownArgumentType]
            model.reducer.prepare_for_backward(tensors)
        elif model.require_backward_grad_sync:
            if self._used is not None:
                used, self._used = self._used, None
                used.check(loss, self.gather_objects)
            if self._ready_order is not None:
                self._ready_order.begin_backward()
            self._learns = self._ready_order is not None and not self._ready_order.is_known

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Look at the gradients. Those that DDP is told to ignore may differ from rank to rank: then ranks ask each other."""
        finite = super().gradients_are_finite(optimizer)
        if self.model is not None and self.model.parameters_to_ignore:
            all_finite = self.all_reduce(torch.tensor(float(finite)), "min", name="finite gradients", each_step=True)
            return bool(all_finite)
        return finite

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, after a check that every gradient was reduced: DDP itself says so in the next forward, too late."""
        model = self.model
        if model is None or self._manual:
            return super().optimizer_step(optimizer)
        check_reduced(model)
        if self._in_backward is not None:
            self._in_backward.step()
            stepped = True
        else:
            if self.scaler is not None and model.parameters_to_ignore:
                self._share_found_inf(optimizer)
            stepped = super().optimizer_step(optimizer)
        if self.comm_hook is not None and stepped:
            self.comm_hook.after_step(cast("nn.Module", model.module).parameters())
        if self._compiled is not None and (news := self._compiled.news(len(self._bucket_sizes(model)))):
            self.say(news)
        if not self._settled:
            self._settle()
        return stepped

    def _settle(self) -> None:
        """The first step is done: all ranks are where they should be, and torch knows a static graph."""
        self._settled, self._learns_graph, self._former_order = True, False, None
        self.allow(self.timeout)

    def _share_found_inf(self, optimizer: Optimizer) -> None:
        """Let all ranks skip where one must: gradients that DDP does not reduce are inf or NaN on some ranks only."""
        assert self.scaler is not None
        states: Any = self.scaler._per_optimizer_states  # pyright: ignore
        if not states[id(optimizer)]["found_inf_per_device"]:
            self.scaler.unscale_(optimizer)
        for found in states[id(optimizer)]["found_inf_per_device"].values():
            self.all_reduce(found, "max", name="found inf")

    def _mean(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket as DDP without a hook computes it: divided first, then summed."""
        buffer = bucket.buffer().div_(self.world_size)
        work = cast("Any", dist.all_reduce(buffer, group=self.groups.training, async_op=True))
        return work.get_future().then(lambda future: future.value()[0])  # pyright: ignore

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scaler, and what DDP's buckets are laid out by."""
        state = super().state_dict()
        if self._ready_order is not None:
            state["ready_order"] = self._ready_order.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the scaler; the buckets are laid out by `wrap`."""
        super().load_state_dict(state)
        self._former_order = state.get("ready_order")

    def rank_state_dict(self) -> dict[str, Any]:
        """What the communication hook keeps of each rank's own; and the optimizers, where they differ with the ranks."""
        if self.comm_hook is None:
            return {}
        state: dict[str, Any] = {"comm_hook": self.comm_hook.state_dict()}
        if self.comm_hook.ranks_differ:
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        return state

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it back to the hook and the optimizers."""
        if self.comm_hook is not None and "comm_hook" in state:
            self.comm_hook.load_state_dict(state["comm_hook"])
        for optimizer, own in zip(self._optimizers, state.get("optimizers", ()), strict=False):
            self.load_optimizer_state(optimizer, own)


def _refuse_python_reducer() -> None:
    dynamo = sys.modules.get("torch._dynamo")  # whoever set the option has imported it
    mode = None if dynamo is None else getattr(dynamo.config, "optimize_ddp", None)
    if isinstance(mode, str) and mode.startswith("python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp={mode!r}: with it DDP broadcasts no buffers and reduces parameter by "
            "parameter. Leave it at True; for compiled autograd, which needs it, there is no strategy yet."
        )


def _name_ignored(step: nn.Module) -> None:
    """Tell DDP, under the step's names, what the user's modules want to be left out of the reduction."""
    ignored = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in cast("Iterable[tuple[str, nn.Module]]", step.named_modules())
        for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ]
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, ignored)  # pyright: ignore
