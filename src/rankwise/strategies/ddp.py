"""`DDPStrategy`; its variants by start method, with restarts, and for "auto"; `SingleDeviceStrategy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checks import accepts, check_value
from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.environments import ClusterEnvironment
from rankwise.environments.network import listening_address
from rankwise.errors import ConfigurationError, InvalidTypeError, LaunchRefusedError
from rankwise.gradient_sync import GradientSync, GradientSyncMode
from rankwise.gradient_sync.comm_hook import is_averaging
from rankwise.gradient_sync.parameters import check_parameters, trained_parameters
from rankwise.launchers import Launcher
from rankwise.launchers.script_place import can_rerun, script_place
from rankwise.process_group.collectives import ALONE, is_distributed
from rankwise.processes.fork_safety import import_dynamo
from rankwise.ranks import RankInfo
from rankwise.strategies.base import GROUP_REMEDY, Strategy
from rankwise.strategies.config import (
    GroupConfig,
    ProcessConfig,
    RegisteredNames,
    agreed_value,
    check_ddp_arguments,
    ddp_names,
    from_parallel_devices,
    refuse_keywords,
    take_fields,
)
from rankwise.strategies.module_wrapping import (
    check_collectives_of,
    compile_within,
    uncompiled,
    wrapped_in_place,
)
from rankwise.strategies.placement import (
    Placement,
    check_variables,
    inline_launcher,
    launcher_of,
    refuse_time_limit,
)

Method = TypeVar("Method", bound=Callable[..., Any])
_NOTHING = nullcontext()
_OF_ONE_PROCESS = ("accelerator", "devices", "num_nodes", "cluster_environment", "precision", "checkpoint_io")


def _or_in_place(configure_ddp: Method) -> Method:
    """Allow overrides without arguments, and let their `super().configure_ddp()` wrap `self.model`."""

    @wraps(configure_ddp)
    def configure(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or "_setup_model" not in vars(self):  # see wrapped_in_place
            return configure_ddp(self, *args, **kwargs)
        self.model = self._setup_model(self.model)
        return self.model

    vars(configure)["may_be_bare"] = True
    return cast(Method, configure)


class DDPStrategy(Strategy):
    """Train on several processes with `DistributedDataParallel`.

    Override `configure_ddp` for a wrapper of your own.

    Args:
        parallel_devices: the device of each local rank, instead of `accelerator` and `devices`.
        process_group_backend: `"gloo"`, `"nccl"`, ...; NCCL on CUDA and gloo on the CPU by default.
        timeout: how long a collective may take, in seconds or as a `timedelta`.
        init_timeout: how long the rendezvous of the ranks may take.
        start_method: `"popen"` (re-run the script), `"spawn"`, `"fork"` or `"forkserver"`. Where an outer
            launcher (torchrun) has started the processes, the strategy starts none.
        rendezvous: the store of a job on one node: `"private"` (no port; refused where an outer launcher has
            started the ranks), `"tcp"` (torch's, on loopback), or `"auto"`: private with gloo, if possible.
        grace_period_s: the time between a rank's stop request and SIGKILL.
        stall_warning: after how long in one phase a rank that others wait for is reported on stderr.
        command: with `"popen"`, the command to run instead of this process's own; its first launch must
            be this one.
        launcher: starts all ranks, on all nodes, instead of a `start_method`.
        sync_batchnorm: whether batch normalisation uses the batches of all ranks in training; CUDA only.
        sync_mode: when the gradients of accumulated batches are averaged: `"single_auto_sync"` (in the last
            backward pass), `"multi_auto_sync"` (in each), `"forced_sync"` (after the last, also where ranks
            lack some gradients), or `"auto"`: the first, but the second with `find_unused_parameters`.
        comm_hook: how DDP averages a bucket of gradients: a name in `CommHookRegistry`, with options as in
            `"powersgd:matrix_approximation_rank=2"`, or a function `hook(state, bucket)`.
        comm_state: the hook's state; by default the named hook's own, or the process group.
        comm_wrapper: `"fp16"` or `"bf16"` around the hook, or a function from a hook to a hook.
        model_averaging_period: with `"post_localsgd"`, after how many steps the models are averaged.
        gradient_weighting: how batches of different sizes are weighted. None: equally. `"samples"`: by their
            number of samples, which the samplers know in advance. `"logged"`: by `self.log_weight()`.
        check_collectives: whether ranks compare each collective before it runs, so that a mismatch is an
            error on all of them; by default what `RANKWISE_CHECK_COLLECTIVES` says (1 or 0).
        ddp_kwargs: for `DistributedDataParallel`, as this version of torch takes them.

    The other arguments are `Strategy`'s.

    Attributes:
        ddp_kwargs: the keywords for `DistributedDataParallel`.

    Raises:
        UnknownArgumentError: for a keyword that neither this class nor the wrapper takes.
        UnknownNameError, InvalidArgumentError, InvalidTypeError: for impossible values.
    """

    registered_names: ClassVar[RegisteredNames] = {
        **ddp_names("ddp", "DDP; the script is run again for each rank"),
        **ddp_names(
            "ddp_forkserver", "DDP; processes are forked by a warm server", start_method="forkserver"
        ),
    }

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] | tuple[int, ...] = "auto",
        num_nodes: Any = "auto",
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: GivenEnvironment | None = None,
        precision: Any = None,
        checkpoint_io: Any = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = timedelta(minutes=10),
        init_timeout: float | timedelta = timedelta(minutes=2),
        start_method: str | None = None,
        rendezvous: str = "auto",
        grace_period_s: float = 1.0,
        stall_warning: float | timedelta = timedelta(minutes=1),
        command: Sequence[str] | None = None,
        launcher: Launcher | None = None,
        sync_batchnorm: bool = False,
        sync_mode: GradientSyncMode | str = "auto",
        comm_hook: Any = None,
        comm_state: Any = None,
        comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        gradient_weighting: str | None = None,
        check_collectives: bool | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        arguments = dict(locals())
        if parallel_devices is not None:
            meant = zip(("accelerator", "devices"), from_parallel_devices(parallel_devices), strict=True)
            arguments |= {name: agreed_value(name, arguments[name], value) for name, value in meant}
        ddp_options = check_ddp_arguments(type(self), ddp_kwargs)
        super().__init__(
            precision=precision,
            checkpoint_io=checkpoint_io,
            gradients=GradientSync(
                sync_mode=sync_mode,
                comm_hook=comm_hook,
                comm_state=comm_state,
                comm_wrapper=comm_wrapper,
                model_averaging_period=model_averaging_period,
                gradient_weighting=gradient_weighting,
                ddp_kwargs=ddp_options,
                needs_ddp=True,
            ),
            **take_fields(ProcessConfig, arguments),
            **take_fields(GroupConfig, arguments),
        )
        self.ddp_kwargs = {**self.gradients.ddp_defaults, **ddp_options}

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device and wrap it; one with nothing to train is not wrapped.

        A module that is wrapped already, or its wrapper, gives the same wrapper again. A module that
        `torch.compile` returned is compiled within the wrapper, until the job ends.

        Raises:
            ConfigurationError: for sharded parameters, and for a wrapper that is not this strategy's.
        """
        given, module = module, uncompiled(module)
        is_compiled = given is not module
        if (existing := self._current_job.modules.wrapper_of(module)) is not None:
            return existing
        check_parameters(module)
        module = self._prepare_module(module)
        if not trained_parameters(module):
            returned = given if is_compiled else module
            self._current_job.modules.plain.update((given, module))
            if dist.is_initialized():
                self.gradients.track(returned, self.data_parallel_group, is_new=True)
            return returned
        if not dist.is_initialized():
            raise self._wrong_state("setup_module()", "a process group", GROUP_REMEDY)
        import_dynamo()
        with self._wrapping_stream():
            configured = self.gradients.wrap(module, lambda: self._configured(module))
        wrapped = self._checked_wrapper(configured)
        self._attach_wrapper(wrapped)
        if is_compiled:
            self._current_job.cleanup.callback(compile_within(module, given))
        return wrapped

    def _checked_wrapper(self, wrapped: object) -> DistributedDataParallel:
        """Return what `configure_ddp` returned, if it averages gradients over the ranks that share data."""
        name, group = f"{type(self).__name__}.configure_ddp()", self.data_parallel_group
        if not isinstance(wrapped, DistributedDataParallel):
            expected = "it to return a DistributedDataParallel"
            raise InvalidTypeError(argument=name, value=wrapped, expected=expected)
        averaged = dist.get_process_group_ranks(wrapped.process_group)
        sharing = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if set(averaged) != set(sharing):
            raise ConfigurationError(
                message=f"{name} averages gradients over other ranks than share the data.",
                facts=f"its wrapper's process_group has the ranks {averaged}, data_parallel_group {sharing}.",
                remedy=f"{type(wrapped).__name__}(module, device_ids=device_ids, "
                "process_group=self.data_parallel_group, **self.ddp_kwargs).",
            )
        return wrapped

    def _attach_wrapper(self, wrapped: DistributedDataParallel) -> None:
        job = self._current_job
        job.modules.wrappers.add(wrapped)
        self.gradients.attach(wrapped, self.local_world_size)
        self.gradients.track(wrapped, self.data_parallel_group, is_new=True)
        if job.check is not None:
            check_collectives_of(wrapped, job.check)
        self._agree_on_gradients(wrapped)

    @_or_in_place
    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        """Wrap a module; override it for a wrapper of your own.

        An override without arguments, as in Lightning 2, replaces the module in `self.model` by the wrapper.

        Args:
            module: on this rank's device already.
            device_ids: what `determine_ddp_device_ids` returned.
        """
        return DistributedDataParallel(
            module, device_ids=device_ids, process_group=self.data_parallel_group, **self.ddp_kwargs
        )

    def _configured(self, module: nn.Module) -> object:
        device_ids = self.determine_ddp_device_ids()
        if accepts(self.configure_ddp, 2):
            return self.configure_ddp(module, device_ids)
        wrap = partial(DDPStrategy.configure_ddp, self, device_ids=device_ids)
        ddp_kwargs = {"process_group": self.data_parallel_group, **self.ddp_kwargs}
        return wrapped_in_place(self, module, wrap, ddp_kwargs)

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, DistributedDataParallel) else super().unwrap_module(module)

    def gradients_may_differ(self, module: nn.Module) -> bool:
        if not isinstance(module, DistributedDataParallel):
            return False
        hooks: list[Any] = [hook for hook, _ in module._comm_hooks]
        are_averaged = not module.parameters_to_ignore and all(is_averaging(hook) for hook in hooks)
        return super().gradients_may_differ(module) or not are_averaged

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return the index of this rank's device; None on the CPU."""
        index = self.root_device.index
        return None if self.root_device.type == "cpu" or index is None else [index]

    @contextmanager
    def _wrapping_stream(self) -> Iterator[None]:
        # A side stream, as torch's notes on CUDA graphs and DDP require; it orders nothing by itself.
        if self.root_device.type != "cuda":
            yield
            return
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing, for accumulating gradients.

        Raises:
            InvalidTypeError: when enabled, and the module is not what `setup_module` returned.
        """
        if not enabled or (self._job is not None and module in self._job.modules.plain):
            return _NOTHING
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        expected = "the module that setup_module() returned, which DDP has wrapped"
        remedy = "module = strategy.setup_module(module)"
        raise InvalidTypeError(argument="module", value=module, expected=expected, remedy=remedy)


class DDPSpawnStrategy(DDPStrategy):
    """`DDPStrategy` that spawns its processes."""

    registered_names: ClassVar[RegisteredNames] = ddp_names("ddp_spawn", "DDP; processes are spawned")
    default_start_method = "spawn"


class DDPForkStrategy(DDPStrategy):
    """`DDPStrategy` that forks its processes; works in notebooks."""

    registered_names: ClassVar[RegisteredNames] = {
        **ddp_names("ddp_fork", "DDP; processes are forked"),
        **ddp_names("ddp_notebook", "DDP; processes are forked, works in notebooks"),
    }
    default_start_method = "fork"


class DDPElasticStrategy(DDPStrategy):
    """`DDPStrategy` on torch's elastic agent: after a failure all ranks start again.

    The launched function then runs from its beginning; `Trainer.fit` continues from the last checkpoint that
    a `ModelCheckpoint` of the same run has written. The calling process is the agent. For a whole script use
    torchrun: `torchrun --max-restarts=3 train.py`, with strategy `"ddp"`.

    Args:
        max_restarts: after how many failures the ranks are started again.
        node_range: the number of nodes, or the smallest and largest number, as in `"1:4"`. Start the same
            program on each of them.
        endpoint: the rendezvous address of the nodes' agents: the first node's `"host:port"`.
        run_id: identifies the job; required with several nodes.

    The other arguments are `DDPStrategy`'s; `start_method` is `"spawn"`, `"fork"` or `"forkserver"`.

    Raises:
        InvalidArgumentError, ConfigurationError: for impossible values.
    """

    registered_names: ClassVar[RegisteredNames] = ddp_names(
        "ddp_elastic", "DDP; torch's elastic agent restarts processes that fail"
    )
    default_start_method: ClassVar[str] = "forkserver"

    def __init__(
        self,
        *,
        max_restarts: Any = 3,
        node_range: int | str = 1,
        endpoint: str = "",
        run_id: str = "",
        **arguments: Any,
    ) -> None:
        from rankwise.launchers.elastic import Nodes

        super().__init__(**arguments)
        if self.start_method == "popen":
            raise ConfigurationError(
                message="ddp_elastic runs a function, not the script again: not start_method='popen'.",
                remedy='"spawn", "fork" or "forkserver"; for a script: torchrun --max-restarts=3 train.py',
            )
        if self.rendezvous == "private":
            raise ConfigurationError(
                message="ddp_elastic cannot use a private rendezvous: torch's agent has a TCP store.",
                remedy='leave rendezvous at "auto"; on one node that store listens on loopback only.',
            )
        is_number = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
        check_value("max_restarts", max_restarts, is_number and max_restarts >= 0, "0 or more")
        fewest, most = _parse_node_range(node_range)
        if most > 1 and not (endpoint and run_id):
            raise ConfigurationError(
                message=f"node_range={node_range!r} needs an endpoint and a run_id.",
                remedy='DDPElasticStrategy(endpoint="first-node:29400", run_id="a name for the job", ...)',
            )
        self.max_restarts = max_restarts
        self._nodes = Nodes(fewest, most, endpoint, run_id, listening_address)

    def create_launcher(self, placement: Placement) -> Launcher:
        from rankwise.launchers.elastic import ElasticLauncher

        if placement.environment.creates_processes_externally:
            return super().create_launcher(placement)
        if (existing := script_place()) is not None:
            raise LaunchRefusedError(
                message="ddp_elastic cannot start processes: this script runs as "
                f"{existing.local_world_size} processes "
                'already, under strategy "ddp", and each of them would start ranks of its own.',
                remedy='use "ddp_spawn" or "ddp_fork" before it; for a script as a whole: '
                "torchrun --max-restarts=3 train.py",
            )
        check_variables(placement, self.group_config)
        refuse_time_limit(self.process_config)
        return ElasticLauncher(
            self.start_method,
            placement.ranks.local_world_size,
            self._nodes,
            max_restarts=self.max_restarts,
            grace_period_s=self.grace_period_s,
            init_timeout=self.init_timeout,
        )


def _parse_node_range(node_range: int | str) -> tuple[int, int]:
    words = str(node_range).split(":")
    numbers = [int(word) if word.isdecimal() else 0 for word in words]
    fewest, most = (numbers[0], numbers[-1]) if len(numbers) <= 2 else (0, 0)
    check_value("node_range", node_range, 1 <= fewest <= most, 'a number or "min:max"')
    return fewest, most


@final
class AutoStrategy(DDPStrategy):
    """One process if one is enough, DDP for several devices or processes.

    The script is run again if that leads to the same launch. If not, as in a notebook, in a shell or after a
    launch that failed, this process is forked.
    """

    registered_names: ClassVar[RegisteredNames] = {
        "auto": ("one process where one is enough, DDP otherwise", {})
    }

    @property
    def start_method(self) -> str:
        """The argument; once bound, the start method of the launcher."""
        launcher = self.placement.launcher if self.is_bound else None
        return getattr(launcher, "start_method", self.process_config.start_method)

    @start_method.setter
    def start_method(self, value: str) -> None:
        self.process_config = dataclasses.replace(self.process_config, start_method=value)

    def create_launcher(self, placement: Placement) -> Launcher:
        processes = self.process_config
        if processes.launcher is None and placement.ranks.world_size == 1:
            refuse_time_limit(processes)
            return inline_launcher(placement)
        if not can_rerun():
            processes = dataclasses.replace(processes, start_method="fork")
        return launcher_of(placement, processes, self.group_config)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module if there are several ranks."""
        return super().setup_module(module) if self.world_size > 1 else Strategy.setup_module(self, module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing; with one rank they never do."""
        return super().no_backward_sync(module, enabled) if self.world_size > 1 else _NOTHING


@final
class SingleDeviceStrategy(Strategy):
    """Train in the calling process. Refused where an outer launcher has started several processes.

    With `cluster_environment="local"` each process trains by itself there, also within a job of another
    strategy: its trainer and its collectives do not use the process group.

    Args:
        gradient_weighting: how accumulated batches of different sizes are weighted; see `DDPStrategy`.
        arguments: `accelerator`, `devices`, `num_nodes`, `cluster_environment`, `precision` and
            `checkpoint_io`, as `Strategy`'s.
    """

    registered_names: ClassVar[RegisteredNames] = {"single_device": ("one process, one device", {})}

    def __init__(self, *, gradient_weighting: str | None = None, **arguments: Any) -> None:
        refuse_keywords(type(self), arguments.keys() - _OF_ONE_PROCESS)
        super().__init__(gradients=GradientSync(gradient_weighting=gradient_weighting), **arguments)

    def setup_environment(self) -> None:
        """Prepare this process, which is alone."""
        self._prepare_process()

    @property
    def job_group(self) -> dist.ProcessGroup | None:
        """No group: this process alone, also if a process group exists."""
        return ALONE if is_distributed() else None

    data_parallel_group = job_group

    def place_ranks(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        for name, count in (("devices", local_world_size), ("num_nodes", num_nodes or environment.num_nodes)):
            expected, remedy = "1 with strategy 'single_device'", 'use strategy="ddp" to train on several.'
            check_value(name, count, count == 1, expected, remedy)
        return RankInfo()

    def create_launcher(self, placement: Placement) -> Launcher:
        world_size = placement.ranks.world_size
        expected = f"another: {placement.environment.name} has started {world_size} processes"
        remedy = (
            'use strategy="ddp", or start one process. To train in each process by itself: '
            'SingleDeviceStrategy(cluster_environment="local").'
        )
        check_value("strategy", "single_device", world_size == 1, expected, remedy)
        return inline_launcher(placement)
