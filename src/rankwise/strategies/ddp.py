"""`DDPStrategy` and its kin: one process per device, gradients averaged by `DistributedDataParallel`."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.environments import ClusterEnvironment
from rankwise.errors import InvalidTypeError, LaunchRefusedError
from rankwise.gradient_sync import GradientSync, GradientSyncMode
from rankwise.gradient_sync.parameters import check_parameters, trained_parameters
from rankwise.launchers import Launcher
from rankwise.launchers.multiprocess import MultiprocessLauncher
from rankwise.launchers.script import ScriptLauncher, script_ranks
from rankwise.monitoring.heartbeat import report_phase
from rankwise.process_group import check_backend, default_backend, gloo_on_interface, process_group
from rankwise.ranks import RankInfo
from rankwise.strategies._compared_collectives import ComparedCollectives, is_check_wanted
from rankwise.strategies.config import (
    RENDEZVOUS,
    START_METHODS,
    check_choice,
    check_command,
    check_ddp_arguments,
    check_grace_period,
    check_platform,
    check_timeout,
    from_parallel_devices,
)
from rankwise.strategies.job import threads_shared_by
from rankwise.strategies.module_wrapping import (
    SyncedBatchNorms,
    averages_everywhere,
    check_sync_batchnorm,
    checked_wrapper,
    compile_within,
    uncompiled,
)
from rankwise.strategies.placement import (
    inline_launcher,
    interface_of,
    place_on_node,
    ranks_on_node,
    refuse_private_elsewhere,
    rendezvous_endpoint,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["DDPStrategy"]

_OWN_ARGUMENTS = (
    "accelerator",
    "devices",
    "num_nodes",
    "parallel_devices",
    "cluster_environment",
    "precision",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "init_timeout",
    "start_method",
    "rendezvous",
    "grace_period_s",
    "stall_warning",
    "command",
    "sync_batchnorm",
    "sync_mode",
    "comm_hook",
    "comm_state",
    "comm_wrapper",
    "model_averaging_period",
    "gradient_weighting",
    "check_collectives",
)


class DDPStrategy(ComparedCollectives):
    """Train on several processes with `DistributedDataParallel`.

    Override `configure_ddp` for a wrapper of your own.

    Args:
        parallel_devices: the device of each local rank, instead of `accelerator` and `devices`.
        process_group_backend: `"gloo"`, `"nccl"`, ...; NCCL on CUDA and gloo on the CPU by default.
        timeout: how long a collective may take, in seconds or as a `timedelta`.
        init_timeout: how long the ranks may take to meet.
        start_method: `"popen"` (re-run the script), `"spawn"`, `"fork"` or `"forkserver"`. Where an outer
            launcher (torchrun) has started the processes, none is started.
        rendezvous: the store through which a job on one node meets: `"private"` (it listens nowhere;
            refused where others have started the ranks), `"tcp"` (torch's, on loopback), or `"auto"`: private
            with gloo, where it can be.
        grace_period_s: how long a rank that is told to stop has before it is killed.
        stall_warning: after how long in one phase a rank is reported on stderr that others wait for.
        command: with `"popen"`, what to run instead of this process's own command line; its first launch must
            be this one.
        sync_batchnorm: whether batch normalisation uses all ranks' batches in training; on CUDA only.
        sync_mode: when the gradients of accumulated batches are averaged: `"single_auto_sync"` (in the last
            backward pass), `"multi_auto_sync"` (in each), `"forced_sync"` (after the last, also where ranks
            lack some gradients), or `"auto"`: the first, but the second with `find_unused_parameters`.
        comm_hook: how DDP averages a bucket of gradients: a name in `CommHookRegistry`, with options as in
            `"powersgd:matrix_approximation_rank=2"`, or a function `hook(state, bucket)`.
        comm_state: the hook's state; by default what its name stands for, or the process group.
        comm_wrapper: `"fp16"` or `"bf16"` around the hook, or a function from a hook to a hook.
        model_averaging_period: with `"post_localsgd"`, after how many steps the models are averaged.
        gradient_weighting: how batches of different sizes count. None: alike. `"samples"`: by their number of
            samples, which the samplers know beforehand. `"logged"`: by what `self.log_weight()` says.
        check_collectives: whether ranks compare each collective before it runs, so that a mismatch is an
            error on all of them; by default what `RANKWISE_CHECK_COLLECTIVES` says (1 or 0).
        ddp_kwargs: for `DistributedDataParallel`, as this version of torch takes them.

    The other arguments are `Strategy`'s.

    Raises:
        UnknownArgumentError: for a keyword that neither this class nor the wrapper takes.
        UnknownNameError, InvalidArgumentError, InvalidTypeError: for values that cannot work.
    """

    default_start_method: ClassVar[str] = "popen"

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] | tuple[int, ...] = "auto",
        num_nodes: Any = "auto",
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | str | None = None,
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
        if parallel_devices is not None:
            accelerator, devices = from_parallel_devices(parallel_devices)
        super().__init__(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            cluster_environment=cluster_environment,
            precision=precision,
            checkpoint_io=checkpoint_io,
        )
        self.start_method = check_choice(
            "start_method", self.default_start_method if start_method is None else start_method, START_METHODS
        )
        check_platform(self.start_method)
        self.rendezvous = check_choice("rendezvous", rendezvous, RENDEZVOUS)
        self.timeout = check_timeout("timeout", timeout)
        self.init_timeout = check_timeout("init_timeout", init_timeout)
        self.grace_period_s = check_grace_period(grace_period_s)
        self.stall_warning = check_timeout("stall_warning", stall_warning)
        ddp_options = check_ddp_arguments(type(self).__name__, _OWN_ARGUMENTS, ddp_kwargs)
        self.gradients = GradientSync(
            sync_mode=sync_mode,
            comm_hook=comm_hook,
            comm_state=comm_state,
            comm_wrapper=comm_wrapper,
            model_averaging_period=model_averaging_period,
            gradient_weighting=gradient_weighting,
            ddp_kwargs=ddp_options,
        )
        self.ddp_kwargs = {**self.gradients.ddp_defaults, **ddp_options}
        self.check_collectives = is_check_wanted(check_collectives)
        self._command = check_command(command)
        self.sync_batchnorm = sync_batchnorm
        self._synced_batchnorms = SyncedBatchNorms()
        is_default = process_group_backend is None
        self._wanted_backend = None if is_default else check_backend(process_group_backend)
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._plain_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    # ------------------------------------------------------------------ places and processes

    @property
    def process_group_backend(self) -> str:
        """What carries the collectives."""
        return self._wanted_backend or default_backend(self.root_device.type)

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """The ranks over which gradients are averaged; None for all of them. Override for a subgroup."""
        return None

    def _place_locally(self, local_world_size: int, num_nodes: int | None) -> RankInfo:
        return place_on_node(self.environment, local_world_size, num_nodes)

    def _create_launcher(self, environment: ClusterEnvironment) -> Launcher:
        if self.sync_batchnorm and self.world_size > 1:
            check_sync_batchnorm(self.root_device)
        if self.rendezvous == "private":
            refuse_private_elsewhere(environment, self.ranks)
        is_alone_here = self.local_world_size == 1 and not self.ranks.is_one_node
        if environment.creates_processes_externally or (is_alone_here and self.start_method == "popen"):
            return inline_launcher(environment, self.ranks)
        local_ranks = ranks_on_node(self.ranks)
        options: dict[str, Any] = {
            "grace_period_s": self.grace_period_s,
            "init_timeout": self.init_timeout,
            "stall_warning_s": self.stall_warning.total_seconds(),
            "teardown_timeout_s": self.timeout.total_seconds(),
            "stop_signals": [signal.SIGTERM, *filter(None, [environment.requeue_signal])],
            "endpoint": rendezvous_endpoint(environment, self.ranks),
        }
        if self.start_method == "popen" or script_ranks() is not None:
            return ScriptLauncher(local_ranks, command=self._command, **options)
        return MultiprocessLauncher(self.start_method, local_ranks, **options)

    def _rendezvous_of_launch(self) -> str:
        if self.rendezvous == "private" and not self._is_group_wanted:
            raise LaunchRefusedError(
                message="init_process_group=False cannot work with a private rendezvous: there is no port.",
                remedy='leave rendezvous at "auto", or use "tcp".',
            )
        if self.rendezvous == "auto":
            # NCCL calls the store from its own C++ threads, and so does what users bring along.
            is_private = self._is_group_wanted and self.process_group_backend == "gloo"
            return "private" if is_private else "tcp"
        return self.rendezvous

    # ------------------------------------------------------------------ a job

    def setup_environment(self) -> None:
        """Prepare this process and connect it to the others.

        Collective: every rank must call this.
        """
        super().setup_environment()
        self._job.enter_context(threads_shared_by(self.local_world_size))
        self._job.enter_context(gloo_on_interface(interface_of(self.ranks, self.worker.address)))
        if self._is_group_wanted:
            report_phase("connecting", waits=True)
            store = self.worker.open_store(self.init_timeout)
            options: dict[str, Any] = {"timeout": self.timeout, "init_timeout": self.init_timeout}
            options["on_rendezvous"] = lambda places: self._job.enter_context(
                self.worker.start_monitors(places, self.init_timeout, self.stall_warning)
            )
            group = process_group(store, self.ranks, self.process_group_backend, self.root_device, **options)
            self._job.enter_context(group)
            self.worker.limit_store(self.timeout)
            self._job.enter_context(self.collectives_compared(store))
        report_phase("running")
        self._job.callback(self._drop_wrappers)

    def _drop_wrappers(self) -> None:
        self._synced_batchnorms.revert()
        self.precision.agree = None
        # torch aborts now and then when a group is destroyed under a live wrapper: its reducer goes first.
        for wrapper in list(self._wrappers):
            for part in ("reducer", "logger"):
                wrapper.__dict__.pop(part, None)
        self._wrappers.clear()
        self.gradients.detach()

    # ------------------------------------------------------------------ the model

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device and wrap it; one with nothing to train is not wrapped.

        A module that `torch.compile` returned is compiled within the wrapper, until the job ends.
        """
        given, module = module, uncompiled(module)
        is_compiled = given is not module
        check_parameters(module)
        if self.sync_batchnorm and self.world_size > 1:
            self._synced_batchnorms.convert(module, self.data_parallel_group)
        module = super().setup_module(module)
        if not trained_parameters(module):
            self._plain_modules.update((given, module))
            return given if is_compiled else module
        if not dist.is_initialized():
            raise self._not_yet("setup_module()", "a process group")
        with self._wrapping_stream():
            configured = self.gradients.wrapped(
                module, lambda: self.configure_ddp(module, self.determine_ddp_device_ids())
            )
        wrapped = checked_wrapper(configured, type(self).__name__, self.data_parallel_group)
        self._wrappers.add(wrapped)
        self.gradients.attach(wrapped, self.local_world_size)
        self.compare_collectives_of(wrapped)
        if self.gradients_may_differ(wrapped):
            self.precision.agree = partial(self.reduce_boolean_decision, all=False)
        if is_compiled:
            self._job.callback(compile_within(module, given))
        return wrapped

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        """Wrap a module; the place for a wrapper of your own.

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

    def _wrapping_stream(self) -> AbstractContextManager[Any]:
        # A side stream, so that DDP's hooks order themselves behind it; torch's notes on CUDA graphs and DDP.
        return torch.cuda.stream(torch.cuda.Stream()) if self.root_device.type == "cuda" else nullcontext()

    def gradients_may_differ(self, module: nn.Module) -> bool:
        """Return whether ranks may hold different gradients: with subgroups, or hooks that are not known."""
        if not isinstance(module, DistributedDataParallel):
            return False
        return self.data_parallel_group is not None or not averages_everywhere(module)

    def restore_module(self, module: nn.Module) -> None:
        """Turn `SyncBatchNorm` back into what it was, in place."""
        self._synced_batchnorms.revert()

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        """Return the user's module from its wrapper."""
        return module.module if isinstance(module, DistributedDataParallel) else uncompiled(module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing, for accumulating gradients.

        Raises:
            InvalidTypeError: when the module is not what `setup_module` returned.
        """
        if isinstance(module, DistributedDataParallel):
            return module.no_sync() if enabled else nullcontext()
        if module in self._plain_modules:
            return nullcontext()
        raise InvalidTypeError(
            argument="module",
            value=type(module).__name__,
            expected="the module that setup_module() returned, which DDP has wrapped",
            remedy="module = strategy.setup_module(module)",
        )

    def on_after_setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Refuse what cannot work with averaged models; an override should call this."""
        self.gradients.check_optimizers(optimizers)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let an optimizer step once, and average the model where it is time; return what `step` returns."""
        returned = super().optimizer_step(optimizer, closure)
        self.gradients.after_step(optimizer)
        return returned

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state; torch's `ZeroRedundancyOptimizer` is consolidated first.

        Collective: where the optimizer is sharded, every rank must call this. Other ranks than 0 get {} then.
        """
        if not self.is_sharded(optimizer):
            return super().get_optimizer_state(optimizer)
        sharded: Any = optimizer
        sharded.consolidate_state_dict(to=0)
        return sharded.state_dict() if self.is_global_zero else {}

    def __getstate__(self) -> dict[str, Any]:
        """Travel without wrappers, which belong to a process group."""
        return {
            **super().__getstate__(),
            "_wrappers": None,
            "_plain_modules": None,
            "_synced_batchnorms": None,
            "_check": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._wrappers = weakref.WeakSet()
        self._plain_modules = weakref.WeakSet()
        self._synced_batchnorms = SyncedBatchNorms()
