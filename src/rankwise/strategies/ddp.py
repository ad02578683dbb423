"""`DDPStrategy`: one process per device, gradients averaged by `DistributedDataParallel`."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.environments import ClusterEnvironment
from rankwise.errors import ConfigurationError, InvalidTypeError, LaunchRefusedError
from rankwise.gradient_sync import GradientSync, GradientSyncMode
from rankwise.gradient_sync.parameters import check_parameters, trained_parameters
from rankwise.launchers import Launcher
from rankwise.launchers.script_place import script_place
from rankwise.monitoring.heartbeat import report_phase
from rankwise.process_group import check_interface, default_backend, gloo_on_interface, process_group
from rankwise.process_group.authentication import groups_authenticated
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.processes.fork_safety import import_dynamo
from rankwise.ranks import RankInfo
from rankwise.stores.sealed import job_key_of_environment
from rankwise.strategies.base import Strategy
from rankwise.strategies.config import (
    GroupConfig,
    PartField,
    ProcessConfig,
    RegisteredNames,
    agreed_value,
    check_ddp_arguments,
    ddp_names,
    from_parallel_devices,
    take_fields,
)
from rankwise.strategies.job import Job, threads_per_rank
from rankwise.strategies.module_wrapping import (
    WrappedModules,
    check_collectives_of,
    checked_wrapper,
    compile_within,
    uncompiled,
)
from rankwise.strategies.placement import (
    Placement,
    check_given_launcher,
    check_private_rendezvous,
    inline_launcher,
    interface_of,
    place_on_all_nodes,
    place_on_node,
    ranks_on_all_nodes,
    ranks_on_node,
    rendezvous_endpoint,
)

if TYPE_CHECKING:
    from rankwise.launchers.supervisor import SupervisionOptions
    from rankwise.stores.tcp import RendezvousEndpoint


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
        start_method, rendezvous, grace_period_s, stall_warning, init_timeout, check_collectives: as the
            arguments; they may be set until `bind`.

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
    default_start_method: ClassVar[str] = "popen"
    start_method = PartField[str]("process_config")
    rendezvous = PartField[str]("process_config")
    grace_period_s = PartField[float]("process_config")
    stall_warning = PartField[timedelta]("process_config")
    init_timeout = PartField[timedelta]("group_config")
    check_collectives = PartField[bool]("group_config")

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
        if start_method is None:
            arguments["start_method"] = self.default_start_method
        ddp_options = check_ddp_arguments(type(self).__name__, DDPStrategy.__init__, ddp_kwargs)
        super().__init__(
            precision=precision,
            checkpoint_io=checkpoint_io,
            process_config=ProcessConfig(**take_fields(ProcessConfig, arguments)),
            group_config=GroupConfig(**take_fields(GroupConfig, arguments)),
            gradients=GradientSync(
                sync_mode=sync_mode,
                comm_hook=comm_hook,
                comm_state=comm_state,
                comm_wrapper=comm_wrapper,
                model_averaging_period=model_averaging_period,
                gradient_weighting=gradient_weighting,
                ddp_kwargs=ddp_options,
            ),
        )
        self.ddp_kwargs = {**self.gradients.ddp_defaults, **ddp_options}

    @property
    def process_group_backend(self) -> str:
        """The back end of the collectives."""
        return self.group_config.process_group_backend or default_backend(self.root_device.type)

    def _place_locally(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        place = place_on_node if self.process_config.launcher is None else place_on_all_nodes
        return place(environment, local_world_size, num_nodes)

    def _create_launcher(self, placement: Placement) -> Launcher:
        ranks = placement.ranks
        if self.sync_batchnorm and ranks.world_size > 1 and placement.root_device.type == "cpu":
            raise ConfigurationError(
                message="sync_batchnorm=True is not possible on the CPU: torch has no SyncBatchNorm there.",
                remedy="leave it out, or train on CUDA devices.",
            )
        self._check_variables(placement)
        if (launcher := self.process_config.launcher) is not None:
            check_given_launcher(placement, launcher, is_private=self.rendezvous == "private")
            return launcher.bound_to(ranks_on_all_nodes(ranks), self._supervision_options(placement, None))
        if self.rendezvous == "private":
            check_private_rendezvous(placement)
        is_alone_here = ranks.local_world_size == 1 and not ranks.is_one_node
        if placement.environment.creates_processes_externally or (
            is_alone_here and self.start_method == "popen"
        ):
            return inline_launcher(placement)
        return self._create_supervised_launcher(placement)

    def _supervision_options(
        self, placement: Placement, endpoint: RendezvousEndpoint | None
    ) -> SupervisionOptions:
        # Modules that start and supervise processes are imported where they are needed.
        from rankwise.launchers.supervisor import SupervisionOptions

        requeue_signal = placement.environment.requeue_signal
        return SupervisionOptions(
            self.grace_period_s,
            self.init_timeout,
            stop_signals=[signal.SIGTERM, *filter(None, [requeue_signal])],
            stall_warning_s=self.stall_warning.total_seconds(),
            teardown_timeout_s=self.timeout.total_seconds(),
            endpoint=endpoint,
        )

    def _create_supervised_launcher(self, placement: Placement) -> Launcher:
        options = self._supervision_options(placement, rendezvous_endpoint(placement))
        ranks = ranks_on_node(placement.ranks)
        if self.start_method == "popen" or script_place() is not None:
            from rankwise.launchers.script import ScriptLauncher

            return ScriptLauncher(ranks, options, self.process_config.command)
        from rankwise.launchers.multiprocess import MultiprocessLauncher

        return MultiprocessLauncher(self.start_method, ranks, options)

    def _check_variables(self, placement: Placement) -> None:
        """Refuse a key that can be guessed, and an interface that this host does not have."""
        job_key_of_environment()
        given = self.group_config.process_group_backend
        if "gloo" in (given or default_backend(placement.root_device.type)):
            check_interface()

    def _choose_rendezvous(self, init_process_group: bool) -> str:
        if self.rendezvous == "private" and not init_process_group:
            raise LaunchRefusedError(
                message="init_process_group=False cannot work with a private rendezvous: there is no port.",
                remedy='leave rendezvous at "auto", or use "tcp".',
            )
        if self.rendezvous == "auto":
            # NCCL, and process groups that users create, call the store from C++ threads of their own.
            is_private = init_process_group and self.process_group_backend == "gloo"
            return "private" if is_private else "tcp"
        return self.rendezvous

    def setup_environment(self) -> None:
        """Prepare this process and connect it to the others.

        Collective: every rank must call this.
        """
        super().setup_environment()
        job = self.job
        job.cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads_per_rank(self.ranks.local_world_size))
        job.cleanup.enter_context(gloo_on_interface(interface_of(self.ranks, job.worker.meeting_host)))
        if self.ranks.world_size > 1:
            key = job.worker.job_key(self.init_timeout)
            job.cleanup.enter_context(groups_authenticated(key, self.init_timeout))
        if job.has_group:
            self._join_group(job)
        report_phase("running")
        job.cleanup.callback(self._release_modules, job.modules)

    def _join_group(self, job: Job) -> None:
        report_phase("connecting", waits=True)
        store = job.worker.open_store(self.init_timeout)
        enter = job.cleanup.enter_context
        group = process_group(
            store,
            self.ranks,
            self.process_group_backend,
            self.root_device,
            timeout=self.timeout,
            init_timeout=self.init_timeout,
            on_rendezvous=lambda places: enter(
                job.worker.start_monitors(places, self.init_timeout, self.stall_warning)
            ),
        )
        enter(group)
        job.worker.limit_store(self.timeout)
        if self.check_collectives and self.ranks.world_size > 1:
            own_store = job.worker.open_another(store, self.init_timeout)
            job.check = CollectiveCheck(self.ranks.global_rank, own_store, self.timeout)
            enter(job.check.checking())

    def _release_modules(self, modules: WrappedModules) -> None:
        """Release the prepared modules at the end of a job, before the process group is destroyed."""
        self.precision.agree = None
        modules.close()
        self.gradients.detach()

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
        if self.sync_batchnorm and self.world_size > 1:
            self._current_job.modules.sync_batchnorms(module, self.data_parallel_group)
        module = super().setup_module(module)
        if not trained_parameters(module):
            self._current_job.modules.plain.update((given, module))
            if dist.is_initialized():
                self._track(given if is_compiled else module)
            return given if is_compiled else module
        if not dist.is_initialized():
            raise self._wrong_state("setup_module()", "a process group")
        import_dynamo()
        with self._wrapping_stream():
            configured = self.gradients.wrap(
                module, lambda: self.configure_ddp(module, self.determine_ddp_device_ids())
            )
        wrapped = checked_wrapper(configured, type(self).__name__, self.data_parallel_group)
        self._attach_wrapper(wrapped)
        if is_compiled:
            self._current_job.cleanup.callback(compile_within(module, given))
        return wrapped

    def _attach_wrapper(self, wrapped: DistributedDataParallel) -> None:
        job = self._current_job
        job.modules.wrappers.add(wrapped)
        self.gradients.attach(wrapped, self.local_world_size)
        self._track(wrapped)
        if job.check is not None:
            check_collectives_of(wrapped, job.check)
        if self.gradients_may_differ(wrapped):
            self.precision.agree = partial(self.reduce_boolean_decision, all=False)

    def _track(self, module: nn.Module) -> None:
        """Follow from now on which parameters are trained."""
        job = self._current_job
        monitor = job.worker.monitor_for_changes(self.timeout) if job.has_group else None
        self.gradients.track(
            module, self.data_parallel_group, is_new=True, timeout=self.timeout, monitor=monitor
        )

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        """Wrap a module; override it for a wrapper of your own.

        Args:
            module: on this rank's device already.
            device_ids: what `determine_ddp_device_ids` returned.
        """
        return DistributedDataParallel(
            module, device_ids=device_ids, process_group=self.data_parallel_group, **self.ddp_kwargs
        )

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
            return nullcontext()
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        raise InvalidTypeError(
            argument="module",
            value=type(module).__name__,
            expected="the module that setup_module() returned, which DDP has wrapped",
            remedy="module = strategy.setup_module(module)",
        )
