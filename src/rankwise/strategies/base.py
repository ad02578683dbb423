"""`Strategy`: how training is distributed. Arguments first, then a placement, then a job for each launch."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn, optim
from typing_extensions import Self

from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.checks import check_keywords
from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.environments import ClusterEnvironment
from rankwise.errors import LaunchRefusedError, LifecycleError
from rankwise.failures.classify import start_exception_chain
from rankwise.gradient_sync import GradientSync
from rankwise.gradient_sync.buckets import reduce_listed
from rankwise.gradient_sync.parameters import check_dense, check_parameters, share_module
from rankwise.launchers import Launcher, WorkerContext
from rankwise.monitoring.heartbeat import OPTIMIZER, report_phase
from rankwise.nested import to_device
from rankwise.precision import Precision
from rankwise.process_group.collectives import ALONE, is_distributed
from rankwise.process_group.distributed_optimizers import SHARDED_MODULE, consolidate, is_sharded
from rankwise.process_group.group import check_group_ranks
from rankwise.processes.exit_codes import exit_code_kept
from rankwise.ranks import RankInfo, job_entry, set_rank_zero_only
from rankwise.strategies.collectives import RankCollectives, write_checkpoint
from rankwise.strategies.config import (
    Devices,
    GroupConfig,
    PartField,
    ProcessConfig,
    RegisteredNames,
    check_parts,
    copied_precision,
    refuse_keywords,
    take_fields,
)
from rankwise.strategies.job import Job, launch_into, launched_parts, sigterm_deferred, variables_set
from rankwise.strategies.module_wrapping import WrappedModules, forward_redirect, own_memory, uncompiled
from rankwise.strategies.placement import Placement, find_placement, launcher_of, place_on_node

T = TypeVar("T")
GROUP_REMEDY = "call launch(), or torch.distributed.init_process_group() before it."
_PLUGINS: Mapping[str, type] = {"precision": Precision, "checkpoint_io": CheckpointIO}


class Strategy(RankCollectives):
    """Start the processes, connect them, wrap the model, synchronise, clean up.

    A strategy is only a configuration until `bind` gives it a placement (ranks, devices, environment and
    launcher), once. Then `launch` runs a function on every rank, as often as needed. Within it, the
    strategy has a `job`, and all other methods work.

    Each rank trains a model of its own, and the gradients of a window are averaged after it. A subclass
    replaces what it does otherwise; docs/strategies.md has the methods in the order of their calls.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        devices: processes on this node: a number, `"auto"` (or -1) for all devices, or device indices.
        num_nodes: the number of nodes; `"auto"` for the environment's.
        cluster_environment: an instance or a name; detected where it is None.
        precision: the precision plug-in.
        checkpoint_io: reads and writes checkpoints.
        gradients: when and how gradients are averaged.
        arguments: `DDPStrategy`'s other arguments of processes and process group.

    Attributes:
        environment: which launcher started this process.
        runs_in_caller: whether the calling process is a rank itself, so that training changes its objects.
        start_method, rendezvous, grace_period_s, stall_warning: as the arguments; may be set until `bind`.
        worker: this rank's context from the launcher; only in a job.
        gradients: when gradients are averaged, through which hook and with which weights. The states of
            communication hooks are kept in it from launch to launch.
        default_parts: which of `"precision"` and `"checkpoint_io"` the constructor was not given.
        results: after a launch, each local rank's value by global rank.
        registered_names: of the class: its names for `register_strategies`, with description and arguments.

    Raises:
        InvalidArgumentError, InvalidTypeError, UnknownNameError, UnknownArgumentError: for wrong arguments.
    """

    registered_names: ClassVar[RegisteredNames] = {}
    default_start_method: ClassVar[str] = "popen"

    start_method = PartField[str]("process_config")
    rendezvous = PartField[str]("process_config")
    grace_period_s = PartField[float]("process_config")
    stall_warning = PartField[timedelta]("process_config")
    environment = PartField[ClusterEnvironment]("placement")
    runs_in_caller = PartField[bool]("launcher")
    worker = PartField[WorkerContext]("job")

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int | Literal["auto"] = "auto",
        cluster_environment: GivenEnvironment | None = None,
        precision: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
        gradients: GradientSync | None = None,
        **arguments: Any,
    ) -> None:
        arguments.update(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
        arguments["cluster_environment"] = cluster_environment
        if arguments.get("start_method") is None:
            arguments["start_method"] = self.default_start_method
        self.process_config = ProcessConfig(**take_fields(ProcessConfig, arguments))
        self.group_config = GroupConfig(**take_fields(GroupConfig, arguments))
        refuse_keywords(type(self), arguments)
        self.gradients = gradients or GradientSync()
        self.precision = Precision() if precision is None else precision
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        self.default_parts = {"precision"} if precision is None else set()
        self.default_parts |= {"checkpoint_io"} if checkpoint_io is None else set()
        check_parts(self, _PLUGINS)
        self.results: dict[int, Any] = {}
        self._placement: Placement | None = None
        self._job: Job | None = None

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register this class in `StrategyRegistry`, or in another registry, under its `registered_names`.

        Raises:
            DuplicateNameError: when a name is taken.
        """
        for name, (description, arguments) in cls.registered_names.items():
            registry.register(name, cls, description, **arguments)

    def with_(self, **changes: Any) -> Self:
        """Return another strategy, not bound, with some arguments changed; this one stays as it is.

        Args:
            changes: `precision`, `checkpoint_io`, and the fields of `ProcessConfig` and `GroupConfig`.

        Raises:
            LifecycleError: in a job of this strategy.
            UnknownArgumentError: for any other argument.
            ConfigurationError: when this strategy is bound, and its precision plug-in cannot be copied.
            InvalidArgumentError, InvalidTypeError, UnknownNameError: as the constructor.
        """
        self._check_not_in_job("with_()")
        derived = copy.copy(self)
        derived.gradients = copy.copy(self.gradients)
        if "precision" not in changes:
            derived.precision = copied_precision(self.precision, is_used=self.is_bound)
        derived._placement, derived._job, derived.results = None, None, {}
        derived.default_parts = self.default_parts - changes.keys()
        for name in changes.keys() & _PLUGINS.keys():
            setattr(derived, name, changes.pop(name))
        check_parts(derived, _PLUGINS)
        for name in ("process_config", "group_config"):
            config = getattr(self, name)
            setattr(derived, name, dataclasses.replace(config, **take_fields(type(config), changes)))
        known = (*_PLUGINS, *vars(self.process_config), *vars(self.group_config))
        check_keywords("with_()", changes, known)
        return derived

    def bind(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int | Literal["auto"] = "auto",
        environment: GivenEnvironment | None = None,
    ) -> RankInfo:
        """Fix ranks, devices, environment and launcher, once. Defaults stand for the constructor's arguments.

        Runs on: every process of the job; starts none.

        Returns:
            This process's ranks. A main process that is not a rank has local rank 0's.

        Raises:
            LifecycleError: when the strategy is bound already.
            InvalidArgumentError, InvalidTypeError, UnknownNameError: for impossible arguments.
            EnvironmentVariableError: when a launcher's variables are wrong.
            WorldSizeMismatchError: when other processes exist than were asked for.
        """
        if self._placement is not None:
            raise self._wrong_state("bind()", "'configured'", "create another strategy, as with_() does.")
        given = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value != "auto"}
        if environment is not None:
            changed["cluster_environment"] = environment
        config = dataclasses.replace(self.process_config, **changed)
        placement = find_placement(config, self.place_ranks)
        self._placement = dataclasses.replace(placement, launcher=self.create_launcher(placement))
        if placement.is_permanent:
            set_rank_zero_only(placement.ranks.global_rank)  # for the life of this process
        return placement.ranks

    def place_ranks(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        """Return this process's ranks where no outer launcher gives it any; refuse impossible numbers."""
        if self.process_config.launcher is None:
            return place_on_node(environment, local_world_size, num_nodes)
        nodes = num_nodes or 1  # of rank 0: this process starts the ranks of all nodes
        return RankInfo(0, 0, 0, nodes * local_world_size, local_world_size, nodes)

    def create_launcher(self, placement: Placement) -> Launcher:
        """Return the launcher for a placement that has none yet; by default as `start_method` says."""
        return launcher_of(placement, self.process_config, self.group_config)

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._placement is not None

    @property
    def placement(self) -> Placement:
        """The result of `bind`; raises `LifecycleError` before it."""
        if self._placement is None:
            raise self._wrong_state("placement", "'bound'")
        return self._placement

    @property
    def job(self) -> Job:
        """This rank's part of the launch that runs now; a `LifecycleError` outside of a launched function."""
        if not self.is_in_job:
            raise self._wrong_state("job", "'in a job'")
        return self._current_job

    @property
    def is_in_job(self) -> bool:
        """Whether this process is a rank of a launch that runs."""
        return self._job is not None and self._job.is_launched

    @property
    def _current_job(self) -> Job:
        """The job; without a launch, one for the process group that the user has created, if any."""
        if self._job is None:
            if self.job_group is not ALONE:
                check_group_ranks(self.ranks)
            self._job = Job(WorkerContext(self.ranks), is_launched=False)
            self.gradients.sync = self._own_sync
        return self._job

    @property
    def launcher(self) -> Launcher:
        """Starts the processes."""
        launcher = self.placement.launcher
        if launcher is None:
            raise self._wrong_state("launcher", "the process that launches")
        return launcher

    def launch(
        self, function: Callable[..., T], *args: Any, init_process_group: bool = True, **kwargs: Any
    ) -> T:
        """Run `function(strategy, *args, **kwargs)` once per rank, after `bind` if that was not called.

        Args:
            function: the function to run.
            args: its further arguments.
            init_process_group: False leaves the process group to the function: every rank has torchrun's
                environment variables, and `torch.distributed.init_process_group("env://")` works.
            kwargs: its keyword arguments.

        Returns:
            Global rank 0's value (on another node: the first local rank's). `results` has every local
            rank's, by global rank.

        Raises:
            WorkerError: when a rank failed; all other ranks have ended by then.
            SystemExit, KeyboardInterrupt: for a signal; `results` is empty unless all ranks had returned.
            LifecycleError: in a job of the same strategy.
            LaunchRefusedError, NotPicklableError: when nothing could be started.
        """
        self._check_not_in_job("launch()")
        if not self.is_bound:
            self.bind()
        self.results = {}
        rendezvous = self._rendezvous_of_launch(init_process_group)
        entry = partial(self._run_as_rank, init_process_group, partial(function, self, *args, **kwargs))
        parts = launched_parts(self, function, args, kwargs)
        with exit_code_kept():
            launch_into(self.results, self.launcher, entry, parts, rendezvous)
        value: T = self.results[min(self.results)]
        return value

    def _rendezvous_of_launch(self, init_process_group: bool = True) -> str:
        """Return `"private"` or `"tcp"`."""
        if self.rendezvous == "private" and not init_process_group:
            raise LaunchRefusedError(
                message="init_process_group=False cannot work with a private rendezvous: there is no port.",
                remedy='leave rendezvous at "auto", or use "tcp".',
            )
        if self.rendezvous != "auto":
            return self.rendezvous
        # NCCL, and process groups that users create, call the store from C++ threads of their own.
        return "private" if init_process_group and self.process_group_backend == "gloo" else "tcp"

    @job_entry
    def _run_as_rank(self, has_group: bool, run: Callable[[], T], worker: WorkerContext) -> T:
        """Run the launched function as the rank of `worker`; return its value."""
        with self.running_as(worker, has_group=has_group):
            return run()

    @contextmanager
    def running_as(self, worker: WorkerContext, *, has_group: bool = True) -> Iterator[None]:
        """Be the rank of `worker` in the block; `has_group` is as for `attach`."""
        with start_exception_chain():
            self.attach(worker, has_group=has_group)
            enter, leave, checkpoint_io = self._connect, self.teardown, self.checkpoint_io
            with sigterm_deferred(checkpoint_io), self.job.running(enter, leave, checkpoint_io):
                yield

    def attach(self, worker: WorkerContext, *, has_group: bool = True) -> None:
        """Start a job as the rank of `worker`; `has_group` is False where the function creates the group."""
        self._placement = dataclasses.replace(self.placement, ranks=worker.ranks)
        before, self._job = self._job, Job(worker, has_group=has_group)
        self.gradients.sync = self._own_sync
        if before is not None:  # modules that were prepared before the launch
            self._job.modules, self._job.cleanup = before.modules, before.cleanup

    def _connect(self) -> None:
        self.setup_environment()
        name = f"{type(self).__name__}.setup_environment()"
        if self.job.has_group:
            self._check_has_group(name, "call super().setup_environment() in it.")

    def _check_has_group(self, call: str, remedy: str = GROUP_REMEDY) -> None:
        if self.world_size > 1 and not is_distributed(self.job_group):
            raise self._wrong_state(call, "a process group", remedy)

    def setup_environment(self) -> None:
        """Prepare this process, and connect it to the others in a process group; an override calls this.

        Collective: every rank must call this. Mutates: `os.environ`, until `teardown`.
        """
        self._prepare_process()
        job = self.job
        job.connect(self.root_device, self.process_group_backend, self.group_config, self.stall_warning)
        report_phase("running")
        job.cleanup.callback(self._release_modules, job.modules)

    def _prepare_process(self) -> None:
        """Set this process's variables, device and `rank_zero_only`, until `teardown`."""
        job = self.job
        job.cleanup.enter_context(variables_set(job.worker.variables))
        job.cleanup.callback(self.environment.teardown)
        job.cleanup.callback(set_rank_zero_only, set_rank_zero_only(self.ranks.global_rank))
        self.precision.device_type = self.root_device.type
        if self.root_device.type == "cuda":
            if torch.cuda.is_initialized():  # perhaps by a job around this one
                job.cleanup.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self.root_device)

    def teardown(self) -> None:
        """Leave this process as it was before `setup_environment`."""
        try:
            if self._job is not None:
                self._job.cleanup.close()
        finally:
            self._job = None

    def _release_modules(self, modules: WrappedModules) -> None:
        """Release the prepared modules at the end of a job, before the process group is destroyed."""
        self.precision.agree = None
        modules.close()
        self.gradients.detach()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a module for training on this rank; return the module to call.

        It is moved to this rank's device, and has rank 0's parameters and buffers afterwards. An override
        calls this, and may return a wrapper of the module; `unwrap_module` then returns the module.

        Collective: every rank must call this.
        """
        if self.world_size == 1:
            return self._prepare_module(module)
        self._check_has_group("setup_module()")
        check_parameters(module)
        module = self._prepare_module(module)
        if self.gradients.sync is None:
            check_dense(module, type(self).__name__)
        share_module(module, self.data_parallel_group)
        self._agree_on_gradients(module)
        return module

    def _prepare_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device, in the precision's format, perhaps with `SyncBatchNorm`."""
        if self.sync_batchnorm and self.world_size > 1:
            self._current_job.modules.sync_batchnorms(module, self.data_parallel_group)
        module = self.module_to_device(self.precision.convert_module(module))
        if self.world_size > 1:
            self.gradients.check_module(module, self)
            job = self._current_job
            monitor = job.worker.monitor_for_changes(self.timeout) if job.has_group else None
            self.gradients.tracking = {"timeout": self.timeout, "monitor": monitor}
        self.gradients.prepare(module, self.data_parallel_group)
        return module

    def _agree_on_gradients(self, module: nn.Module) -> None:
        """Let the ranks agree on decisions of the precision, if their gradients may differ."""
        if self.gradients_may_differ(module):
            self.precision.agree = partial(self.reduce_boolean_decision, all=False)

    def restore_module(self, module: nn.Module) -> None:
        """Replace `SyncBatchNorm` by the original layers, in place; the end of the job does that too."""
        if self._job is not None:
            self._job.modules.restore_batchnorms()

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device, and out of memory that forked ranks share, in place."""
        own_memory(module, self.placement.launcher)
        return module.to(self.root_device)

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        """Return the user's module within the result of `setup_module`."""
        return uncompiled(module)

    def call_method(self, wrapped: nn.Module, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the user's module through the wrapper, as its forward pass."""
        return forward_redirect(wrapped, self.unwrap_module(wrapped), method, *args, **kwargs)

    def batch_to_device(self, batch: T) -> T:
        """Move every tensor of a batch, also in nested containers, to this rank's device."""
        return to_device(batch, self.root_device, non_blocking=True)

    @property
    def gradient_weighting(self) -> str | None:
        """`"samples"`, `"logged"`, or None where each rank and microbatch has the same weight."""
        return self.gradients.weighting

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients; `options` are passed to `Precision.backward` and `Tensor.backward`."""
        report_phase("backward", waits=True)
        self.precision.backward(loss, **options)

    def optimizer_step(
        self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
        """Run one step of an optimizer, then average the model if it is due; return what `step` returns."""
        report_phase(OPTIMIZER)
        returned = self.precision.optimizer_step(optimizer, closure, **options)
        self.gradients.after_step(optimizer)
        return returned

    def on_after_setup_optimizers(self, optimizers: list[optim.Optimizer]) -> None:
        """Refuse optimizers that cannot work with averaged models; an override should call this."""
        self.gradients.check_optimizers(optimizers)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes leave gradients on this rank as they are, if `enabled`.

        Override it where backward passes communicate: it is entered for each microbatch, `enabled` unless the
        microbatch ends the window; and in manual optimisation for each `training_step`.
        """
        return nullcontext()

    def sync_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of a window over the ranks, in place. Collective.

        Called once after the last backward pass of each window, and in manual optimisation after each
        `manual_backward`; before `on_after_backward`, clipping and the optimizer. Not with one rank.

        Args:
            parameters: the trained parameters that have no averaged gradients yet, in an order that is the
                same on all ranks; a gradient may be None.
        """
        reduce_listed(parameters, self.data_parallel_group)

    @property
    def _own_sync(self) -> Callable[[Sequence[Tensor]], None] | None:
        return None if type(self).sync_gradients is Strategy.sync_gradients else self.sync_gradients

    @property
    def has_equal_models(self) -> bool:
        """Whether each step leaves all ranks with the same parameters, which rankwise then checks.

        A strategy that averages models returns False: its ranks are compared where `sync_models` has made
        them equal, which is before each checkpoint and at the end of a fit.
        """
        return self.gradients.period is None

    def sync_models(self) -> None:
        """Give all ranks the same parameters, before a checkpoint and as a fit ends. Collective."""
        self.gradients.average_models()

    def gradient_sync_context(
        self, module: nn.Module, optimizers: Iterable[optim.Optimizer] = (), is_final_microbatch: bool = True
    ) -> AbstractContextManager[None]:
        """Return the block for a microbatch's forward and backward pass, in the strategy's `sync_mode`.

        Collective: every rank must enter it; see `rankwise.gradient_sync.gradient_sync_context`.

        Args:
            module: what `setup_module` returned.
            optimizers: the ones that step after the window.
            is_final_microbatch: whether they step next.

        Raises:
            UnusedParametersError: when the loss does not depend on some parameters that DDP expects.
        """
        no_sync, parameters_of = self.no_backward_sync, self.precision.model_parameters
        group = self.data_parallel_group
        return self.gradients.context(module, optimizers, is_final_microbatch, no_sync, parameters_of, group)

    def gradients_may_differ(self, module: nn.Module) -> bool:
        """Return whether ranks may have different gradients after a synchronised backward pass.

        If so, decisions that depend on gradients take a collective. They may with subgroups, with a
        `sync_gradients` of your own, and with hooks that are not rankwise's or torch's.
        """
        return self.world_size > 1 and (
            self.data_parallel_group is not None or self.gradients.sync is not None
        )

    def weighted_loss(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return the tensor to call `backward` on, for a loss of this weight.

        With `gradient_weighting="logged"` the gradients are then the weighted average over all microbatches
        of all ranks, once a `gradient_sync_context` has ended their window.

        Args:
            loss: a mean, over tokens for example.
            weight: the number of items of that mean; it may be 0.

        Raises:
            ConfigurationError: with another `gradient_weighting`.
            InvalidArgumentError: for a weight that is negative or not finite.
        """
        return self.gradients.weight_loss(loss, weight)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state; its keys never have a wrapper's prefix."""
        return self.unwrap_module(module).state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load what `get_module_state_dict` returned, in place."""
        self.unwrap_module(module).load_state_dict(state_dict, strict=strict)

    def is_sharded(self, optimizer: optim.Optimizer) -> bool:
        """Return whether each rank has only a part of the optimizer's state."""
        return SHARDED_MODULE in sys.modules and is_sharded(optimizer)

    def get_optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state; torch's `ZeroRedundancyOptimizer` is consolidated first.

        Collective: if the optimizer is sharded, every rank must call this. Ranks other than 0 get {} then.
        """
        if not self.is_sharded(optimizer):
            return optimizer.state_dict()
        consolidate(optimizer)
        return optimizer.state_dict() if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a checkpoint on global rank 0; all ranks continue when it is written, or all raise.

        Collective: every rank must call this, in the same order. After a failure each rank that does writes;
        after a job the other ranks wait for rank 0 alone.

        Raises:
            CheckpointError: on every rank, when it could not be written.
            LifecycleError: on a rank that another one's failure has stopped within an optimizer step.
        """
        write_checkpoint(self, checkpoint, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a checkpoint, to the CPU."""
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu")

    def _check_not_in_job(self, call: str) -> None:
        if self.is_in_job:
            remedy = "a launched function calls what it needs directly: it runs on every rank already."
            raise self._wrong_state(call, "'bound'", remedy)

    def _wrong_state(
        self, call: str, needed: str, remedy: str = "call bind() or launch() first."
    ) -> LifecycleError:
        state = "in a job" if self.is_in_job else "bound" if self.is_bound else "configured"
        verb = "read" if isinstance(getattr(type(self), call, None), property) else "called"
        return LifecycleError(call, state, needed, remedy, verb)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the job and its results: they belong to this process."""
        return {**self.__dict__, "_job": None, "results": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'configured' if self._placement is None else self.ranks})"
