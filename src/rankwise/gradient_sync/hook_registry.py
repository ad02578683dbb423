"""`CommHookRegistry`: hooks by name, the default ones, and the average of models for post-local SGD."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.checks import accepts, check_keywords, check_value
from rankwise.errors import ConfigurationError, InvalidTypeError, MissingExtraError, UnknownNameError
from rankwise.gradient_sync.parameters import parameters_of
from rankwise.named_options import NameTable, package_of
from rankwise.process_group.distributed_optimizers import is_distributed_optimizer
from rankwise.seed import set_numpy_state

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

CommHookFunction = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
Layout = tuple[str, ...]
"""The names of the parameters in a bucket."""
_DISTRIBUTED = ("ZeroRedundancyOptimizer", "DistributedOptimizer", "_NamedOptimizer", "PostLocalSGDOptimizer")


@final
class HookPlace(NamedTuple):
    """The ranks for which a hook's state is created.

    Attributes:
        process_group: the ranks over which gradients are averaged; None for all ranks.
        local_world_size: how many of them are on this node.
    """

    process_group: dist.ProcessGroup | None
    local_world_size: int


@final
class NamedHook(NamedTuple):
    """A registered hook; `CommHookRegistry.register` documents its fields."""

    hook: CommHookFunction
    make_state: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    description: str = ""
    averages: bool = False

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise for options that `make_state` does not take, or `check` refuses."""
        parameters = {} if self.make_state is None else inspect.signature(self.make_state).parameters
        known = tuple(parameters)[1:]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            check_keywords(f"comm_hook {name!r}", options, known)
        if self.check is not None:
            self.check(**options)


@final
class _Registry(NameTable[NamedHook]):
    """Maps names, in any case, to communication hooks."""

    kind = "Hook"
    title = "CommHookRegistry"
    argument = "comm_hook"
    group = "comm_hooks"

    def register(
        self,
        name: Any,
        hook: CommHookFunction,
        make_state: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        check: Callable[..., None] | None = None,
        averages: bool = False,
    ) -> None:
        """Register a communication hook, for `DDPStrategy(comm_hook="name:option=value")`.

        Args:
            name: case does not matter.
            hook: `hook(state, bucket)`, as DDP calls it.
            make_state: `make_state(place, **options)` with a `HookPlace`, called on every rank. Without it
                the state is the process group.
            description: one line.
            override: whether to replace a hook of that name.
            check: `check(**options)`, called in the strategy's constructor.
            averages: whether all ranks have the same gradients after it. Otherwise a check of the
                gradients, such as for infinite ones, costs a collective.

        Raises:
            InvalidTypeError: when the name is not a string, or the hook does not take a state and a bucket.
            DuplicateNameError: when the name is taken.
        """
        key = self._check_name(name, override)
        self._entries[key] = NamedHook(check_comm_hook(hook), make_state, check, description, averages)

    def _entries_of(self, point: EntryPoint, loaded: Any) -> Mapping[str, NamedHook]:
        entry = loaded if isinstance(loaded, NamedHook) else NamedHook(check_comm_hook(loaded))
        description = f"{entry.description} (package {package_of(point)})".lstrip()
        return {point.name: entry._replace(description=description)}

    def _unknown(self, name: str) -> UnknownNameError:
        return UnknownNameError(kind="comm_hook", name=name, known=tuple(self))

    get = NameTable[NamedHook].entry


def check_comm_hook(hook: object) -> CommHookFunction:
    """Return the hook if it can be called with a state and a bucket, or raise."""
    if callable(hook) and not isinstance(hook, type) and accepts(hook, 2):
        return hook
    raise InvalidTypeError(
        argument="comm_hook",
        value=hook,
        expected="a name, or a function of two arguments: a state and a torch.distributed.GradBucket",
        remedy="def my_hook(state, bucket): return a torch.futures.Future of bucket.buffer(), averaged.",
    )


CommHookRegistry = _Registry()


def averaged(group: Any, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a tensor over the ranks, in place."""
    work: Any = dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


@final
@dataclass(frozen=True)
class CastHook:
    """Runs another hook on a bucket in `dtype`; sparse gradients keep their dtype."""

    dtype: torch.dtype
    hook: CommHookFunction

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket."""
        original = bucket.buffer()
        if original.is_sparse:  # torch adds no sparse tensors in 16 bits
            return self.hook(state, bucket)
        bucket.set_buffer(original.to(self.dtype))
        return self.hook(state, bucket).then(lambda done: original.copy_(done.value()))


def allreduce_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the process group, which is the state."""
    return averaged(state, bucket.buffer())


def _noop_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def powersgd_hook(memory: PowerSGDMemory, bucket: Any) -> Any:
    """Call torch's `powerSGD_hook`, which starts its second and third all-reduce in callbacks.

    gloo runs callbacks in its own threads, so callbacks of two buckets would start their all-reduces in an
    order that differs between ranks. So each bucket is finished before the next; NCCL orders them itself.
    Sparse gradients are not compressed.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    if bucket.buffer().is_sparse:
        memory.state.maybe_increase_iter(bucket)
        return allreduce_hook(memory.state.process_group, bucket)
    memory.fit(bucket)
    future = powerSGD_hook(memory.state, bucket)
    if not (bucket.buffer().is_cuda and "nccl" in dist.get_backend(memory.state.process_group)):
        future.wait()
    return future


def check_powersgd_device(device: torch.device) -> None:
    """Raise for a CPU where torch sees a GPU: its hook then synchronises the gradients' device as a GPU."""
    if device.type == "cpu" and torch.cuda.device_count():  # does not initialise CUDA
        raise ConfigurationError(
            message='comm_hook="powersgd" cannot be used on CPUs where torch sees a GPU.',
            facts="torch's powerSGD_hook would fail when it begins to compress: it takes the CPU for a GPU.",
            remedy='accelerator="cuda"; or hide the GPU: CUDA_VISIBLE_DEVICES="".',
        )


@final
@dataclass(eq=False)
class PowerSGDMemory:
    """torch's `PowerSGDState`, whose memory is also kept by parameter name.

    The memory is the error feedback (what compression lost) and the last approximation. torch keeps it by
    bucket index only, but DDP rebuilds its buckets after the first step, and so after each restart.
    """

    state: PowerSGDState
    _names: dict[int, str] = field(default_factory=dict, init=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False)
    _layouts: dict[int, Layout] = field(default_factory=dict, init=False)
    _errors: dict[str, Tensor] = field(default_factory=dict, init=False)  # not yet assigned to a bucket
    _bases: dict[Layout, Tensor] = field(default_factory=dict, init=False)

    def name_parameters(self, module: nn.Module) -> None:
        """Register the names of the parameters in the buckets; keep the memory of those that are known."""
        self._collect(0)
        for name, parameter in module.named_parameters():
            self._names[id(parameter)], self._sizes[name] = name, parameter.numel()
        self._errors = self._of_right_size(self._errors)

    def _of_right_size(self, errors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: error for name, error in errors.items() if self._sizes.get(name) == error.numel()}

    def fit(self, bucket: Any) -> None:
        """Assign memory to this bucket, if its parameters have changed."""
        index = bucket.index()
        parameters = bucket.parameters()
        layout = tuple(self._names.get(id(parameter), "?") for parameter in parameters)
        if self._layouts.get(index) == layout:
            return
        if index in self._layouts:  # DDP has rebuilt its buckets
            self._collect(index)
        self._layouts[index] = layout
        buffer, state = bucket.buffer(), self.state
        if any(name in self._errors for name in layout):
            pieces = [
                self._errors.pop(name, parameter.new_zeros(parameter.numel())).to(buffer)
                for name, parameter in zip(layout, parameters, strict=True)
            ]
            state.error_dict[index] = torch.cat(pieces)
        if (basis := self._bases.pop(layout, None)) is not None:
            state.q_memory_dict[index] = basis.to(buffer)
            state.p_memory_dict[index] = buffer.new_empty(self._left_factor_size(parameters))

    def _left_factor_size(self, parameters: list[Tensor]) -> int:
        """Return the number of elements of a bucket's left factors (torch's P matrices)."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

        size = 0
        for parameter in parameters:
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if _should_compress(rows, columns, rank, self.state.min_compression_rate)[0]:
                size += rows * rank
        return size

    def _collect(self, first: int) -> None:
        """Move the memory of the buckets from index `first` on back to the parameter names."""
        self._errors, self._bases = self._by_name(first)
        state = self.state
        memories: list[dict[int, Any]] = [state.error_dict, state.p_memory_dict, state.q_memory_dict]
        for memory in (*memories, self._layouts):
            for index in [index for index in memory if index >= first]:
                del memory[index]

    def _by_name(self, first: int) -> tuple[dict[str, Tensor], dict[Layout, Tensor]]:
        """Return the errors by parameter and the bases by layout, of buckets from index `first` on."""
        errors, bases = dict(self._errors), dict(self._bases)
        for index, layout in self._layouts.items():
            if index >= first and index in self.state.error_dict:
                sizes = [self._sizes[name] for name in layout]
                errors.update(zip(layout, self.state.error_dict[index].split(sizes), strict=True))
            if index >= first and index in self.state.q_memory_dict:
                bases[layout] = self.state.q_memory_dict[index]
        return errors, bases

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, in plain types and tensors."""
        random_state: Any = self.state.rng.get_state(legacy=True)
        kind, keys, *numbers = random_state
        errors, bases = self._by_name(0)
        return {
            "iter": self.state.iter,
            "errors": {name: error.detach().clone() for name, error in errors.items()},
            "bases": [
                {"parameters": list(layout), "basis": basis.detach().clone()}
                for layout, basis in bases.items()
            ],
            "random": [kind, keys.tolist(), *numbers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, without the errors of parameters that have changed."""
        self._collect(0)
        self.state.iter = state["iter"]
        self._errors = self._of_right_size(state["errors"])
        self._bases = {tuple(entry["parameters"]): entry["basis"] for entry in state["bases"]}
        set_numpy_state(self.state.rng, state["random"])


def _make_powersgd_state(place: HookPlace, **options: Any) -> PowerSGDMemory:
    try:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        known = tuple(inspect.signature(PowerSGDState).parameters)[1:]
        check_keywords("comm_hook 'powersgd'", options, known)
        return PowerSGDMemory(PowerSGDState(place.process_group, **options))
    except ImportError:
        raise MissingExtraError(package="numpy", extra="powersgd", purpose="PowerSGD") from None


def _check_powersgd(**options: Any) -> None:
    rank = options.get("matrix_approximation_rank", 1)
    check_value("matrix_approximation_rank", rank, isinstance(rank, int) and rank >= 1, "1 or more")
    try:
        _make_powersgd_state(HookPlace(None, 1), **options)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(message=f"comm_hook 'powersgd' cannot work: {error}") from None


def _make_local_sgd_state(
    place: HookPlace,
    *,
    start_localSGD_iter: int = 100,  # noqa: N803  torch's name
    post_local_gradient_allreduce: bool = True,
    subgroup_size: int | None = None,
) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    subgroup = _subgroup(place, subgroup_size) if post_local_gradient_allreduce else None
    return PostLocalSGDState(
        place.process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce
    )


def _subgroup(place: HookPlace, size: int | None) -> Any:
    """Return the group of the ranks on this node, or of `size` ranks in a row."""
    world_size = dist.get_world_size(place.process_group)
    size = place.local_world_size if size is None else size
    if size == world_size:
        return place.process_group or dist.group.WORLD
    if world_size % size or world_size != dist.get_world_size():
        raise ConfigurationError(
            message=f"{world_size} ranks cannot be split into groups of {size} for local SGD.",
            facts=f"{place.local_world_size} of them are on this node.",
            remedy=f'comm_hook="post_localsgd:subgroup_size=..." with a divisor of {world_size}, over all '
            "ranks.",
        )
    return dist.new_subgroups(group_size=size)[0]


def _check_local_sgd(**options: Any) -> None:
    for name, smallest in (("start_localSGD_iter", 0), ("subgroup_size", 1)):
        value = options.get(name)
        is_valid = value is None or (isinstance(value, int) and value >= smallest)
        check_value(name, value, is_valid, f"{smallest} or more")


def _local_sgd_hook(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

    return post_localSGD_hook(state, bucket)


@final
@dataclass(eq=False)
class ModelAveraging:
    """Averages the parameters of each optimizer after every `period`-th step, after `warmup_steps`."""

    period: int
    warmup_steps: int
    group: dist.ProcessGroup | None
    _steps: dict[Optimizer, int] = field(default_factory=dict, init=False)
    _changed: dict[Optimizer, set[Tensor]] = field(default_factory=dict, init=False)  # since the last average
    _restored: list[int] = field(default_factory=list, init=False)  # for optimizers yet to step

    def after_step(self, optimizer: Optimizer) -> None:
        """Average the optimizer's parameters if the period is over; every rank calls it after each step."""
        number = len(self._steps)
        if optimizer not in self._steps:
            refuse_distributed_optimizer(optimizer)
            self._steps[optimizer] = self._restored[number] if number < len(self._restored) else 0
        since = self._steps[optimizer] - self.warmup_steps
        self._steps[optimizer] += 1
        if since >= 0:
            used = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
            self._changed.setdefault(optimizer, set()).update(used)
            if since % self.period == 0:
                self._average(optimizer)

    def average_now(self) -> None:
        """Average the parameters now, on every rank, unless they were averaged after the last step."""
        for optimizer in self._changed:
            self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        """Average the changed parameters; averaging the others would change them by rounding."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        if changed := self._changed[optimizer]:
            parameters: Any = [parameter for parameter in parameters_of(optimizer) if parameter in changed]
            average_parameters(iter(parameters), self.group)  # type: ignore[arg-type]  # None is the default group
            changed.clear()

    @property
    def steps(self) -> list[int]:
        """The number of steps of each optimizer."""
        return list(self._steps.values()) or self._restored

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        self._restored = list(steps)
        self._steps.update(zip(self._steps, steps, strict=False))


def refuse_distributed_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer that updates a part of the parameters, or averages models itself."""
    if is_distributed_optimizer(optimizer, *_DISTRIBUTED):
        raise ConfigurationError(
            message=f"model_averaging_period cannot work with {type(optimizer).__name__}.",
            facts="a distributed optimizer updates other parameters on each rank, or averages models itself.",
            remedy="use a plain optimizer with it, such as torch.optim.SGD, or another comm_hook.",
        )


for _name, _hook, _description in (
    ("allreduce", allreduce_hook, "average, as DDP does without a hook"),
    ("fp16_compress", CastHook(torch.float16, allreduce_hook), "average in 16-bit floating point"),
    ("bf16_compress", CastHook(torch.bfloat16, allreduce_hook), "average in bfloat16"),
    ("noop", _noop_hook, "communicate nothing, to measure what communication costs"),
):
    CommHookRegistry.register(_name, _hook, description=_description, averages=_name != "noop")
CommHookRegistry.register(
    "powersgd",
    powersgd_hook,
    _make_powersgd_state,
    "send low-rank approximations, with error feedback (https://arxiv.org/abs/1905.13727)",
    check=_check_powersgd,
    averages=True,
)
CommHookRegistry.register(
    "post_localsgd",
    _local_sgd_hook,
    _make_local_sgd_state,
    "after some steps average gradients per node, and models periodically (https://arxiv.org/abs/1808.07217)",
    check=_check_local_sgd,
)
