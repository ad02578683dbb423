"""`Strategy`: how training is distributed. Arguments first, then a placement, then a job for each launch."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.checks import check_keywords
from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.environments import ClusterEnvironment
from rankwise.errors import LifecycleError
from rankwise.failures.classify import start_exception_chain
from rankwise.gradient_sync import GradientSync
from rankwise.launchers import Launcher
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import OPTIMIZER, report_phase
from rankwise.nested import to_device
from rankwise.precision import Precision
from rankwise.process_group import collectives, objects, rank_zero_first
from rankwise.process_group.distributed_optimizers import SHARDED_MODULE, consolidate, is_sharded
from rankwise.process_group.group import check_group_ranks
from rankwise.processes.exit_codes import exit_code_kept
from rankwise.ranks import RankInfo, job_entry, set_rank_zero_only
from rankwise.strategies.checkpoint_writing import write_checkpoint
from rankwise.strategies.config import (
    Devices,
    GroupConfig,
    PartField,
    ProcessConfig,
    RegisteredNames,
    WithParts,
    check_parts,
    copied_precision,
    take_fields,
)
from rankwise.strategies.job import Job, launch_into, launched_parts, sigterm_deferred, variables_set
from rankwise.strategies.module_wrapping import averages_everywhere, forward_redirect, own_memory, uncompiled
from rankwise.strategies.placement import Placement, find_placement
from rankwise.strategies.shared_errors import errors_shared

T = TypeVar("T")
_PLUGINS: Mapping[str, type] = {"precision": Precision, "checkpoint_io": CheckpointIO}


class Strategy(WithParts, ABC):
    """Start the processes, connect them, wrap the model, synchronise, clean up.

    A strategy is only a configuration until `bind` gives it a placement (ranks, devices, environment and
    launcher), once. Then `launch` runs a function on every rank, as often as needed. Within it, the
    strategy has a `job`, and all other methods work.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        devices: processes on this node: a number, `"auto"` (or -1) for all devices, or device indices.
        num_nodes: the number of nodes; `"auto"` for the environment's.
        cluster_environment: an instance or a name; detected where it is None.
        precision: the precision plug-in.
        checkpoint_io: reads and writes checkpoints.
        process_config, group_config, gradients: for subclasses with more arguments; the first replaces the
            first four arguments.

    Attributes:
        ranks: the ranks of this process; in a main process that is not a rank, local rank 0's.
        global_rank, local_rank, node_rank, world_size, local_world_size, num_nodes, is_global_zero: of ranks.
        root_device: this process's device.
        environment: which launcher started this process.
        runs_in_caller: whether the calling process is a rank itself, so that training changes its objects.
        worker: this rank's context from the launcher; only in a job.
        gradients: when gradients are averaged, through which hook and with which weights. The states of
            communication hooks are kept in it from launch to launch.
        default_parts: which of `"precision"` and `"checkpoint_io"` the constructor was not given.
        results: after a launch, each local rank's value by global rank.
        timeout: how long a collective may take.
        sync_batchnorm: whether batch normalisation uses the batches of all ranks in training.
        registered_names: of the class: its names for `register_strategies`, with description and arguments.

    Raises:
        InvalidArgumentError, InvalidTypeError, UnknownNameError: for impossible arguments.
    """

    registered_names: ClassVar[RegisteredNames] = {}

    timeout = PartField[timedelta]("group_config")
    sync_batchnorm = PartField[bool]("group_config")
    environment = PartField[ClusterEnvironment]("placement")
    ranks = PartField[RankInfo]("placement")
    root_device = PartField[torch.device]("placement")
    global_rank = PartField[int]("placement.ranks")
    local_rank = PartField[int]("placement.ranks")
    node_rank = PartField[int]("placement.ranks")
    world_size = PartField[int]("placement.ranks")
    local_world_size = PartField[int]("placement.ranks")
    num_nodes = PartField[int]("placement.ranks")
    is_global_zero = PartField[bool]("placement.ranks")
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
        process_config: ProcessConfig | None = None,
        group_config: GroupConfig | None = None,
        gradients: GradientSync | None = None,
    ) -> None:
        self.process_config = process_config or ProcessConfig(
            accelerator, devices, num_nodes, cluster_environment
        )
        self.group_config = group_config or GroupConfig()
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
        placement = find_placement(config, self._place_locally)
        self._placement = dataclasses.replace(placement, launcher=self._create_launcher(placement))
        if placement.is_permanent:
            set_rank_zero_only(placement.ranks.global_rank)  # for the life of this process
        return placement.ranks

    @abstractmethod
    def _place_locally(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        """Return this process's ranks where no outer launcher gives it any; refuse impossible numbers."""

    @abstractmethod
    def _create_launcher(self, placement: Placement) -> Launcher:
        """Return the launcher for a placement that has none yet."""

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
            if self.job_group is not collectives.ALONE:
                check_group_ranks(self.ranks)
            self._job = Job(WorkerContext(self.ranks), is_launched=False)
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
        rendezvous = self._choose_rendezvous(init_process_group)
        entry = partial(self._run_as_rank, init_process_group, partial(function, self, *args, **kwargs))
        parts = launched_parts(self, function, args, kwargs)
        with exit_code_kept():
            launch_into(self.results, self.launcher, entry, parts, rendezvous)
        value: T = self.results[min(self.results)]
        return value

    def _choose_rendezvous(self, init_process_group: bool) -> str:
        """Return `"private"` or `"tcp"`, for a launch."""
        return "private"

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
            enter, leave, checkpoint_io = self.setup_environment, self.teardown, self.checkpoint_io
            with sigterm_deferred(checkpoint_io), self.job.running(enter, leave, checkpoint_io):
                yield

    def attach(self, worker: WorkerContext, *, has_group: bool = True) -> None:
        """Start a job as the rank of `worker`; `has_group` is False where the function creates the group."""
        self._placement = dataclasses.replace(self.placement, ranks=worker.ranks)
        before, self._job = self._job, Job(worker, has_group=has_group)
        if before is not None:  # modules that were prepared before the launch
            self._job.modules, self._job.cleanup = before.modules, before.cleanup

    def setup_environment(self) -> None:
        """Prepare this process: its variables, `rank_zero_only`. Subclasses connect to the others here.

        Mutates: `os.environ`, until `teardown`.
        """
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

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device and prepare it for training; return the module to call."""
        module = self.module_to_device(self.precision.convert_module(module))
        if self.world_size > 1:
            self.gradients.check_module(module)
        self.gradients.prepare(module, self.data_parallel_group)
        return module

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
        return module.module if isinstance(module, DistributedDataParallel) else uncompiled(module)

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
        """Return a context in which backward passes leave gradients on this rank as they are."""
        return nullcontext()

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

        If so, decisions that depend on gradients take a collective. They may with subgroups, and with hooks
        that are not rankwise's or torch's own.
        """
        if not isinstance(module, DistributedDataParallel):
            return False
        return self.data_parallel_group is not None or not averages_everywhere(module)

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

    def end_training(self) -> None:
        """Average the model over the ranks if a communication hook has let them diverge. Collective."""
        self.gradients.average_models()

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

    def comm_hook_states(self) -> list[list[dict[str, Any]]]:
        """Return the states of communication hooks, by rank and module; [] but on rank 0. Collective."""
        return self.gradients.gathered_states()

    def load_comm_hook_states(self, states: list[list[dict[str, Any]]]) -> None:
        """Load what `comm_hook_states` returned on rank 0; [] resets the states."""
        self.gradients.load_states(states)

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

    @property
    def job_group(self) -> dist.ProcessGroup | None:
        """All ranks of the job, as the `group` of a collective of this strategy."""
        return dist.group.WORLD

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the data; None for all. Wrapping, reducing and sampling use it."""
        return None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How samplers split the data: `num_replicas` and `rank`. Override it to split it in another way."""
        group = self.data_parallel_group
        if group is None or self.world_size == 1:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": dist.get_world_size(group), "rank": dist.get_rank(group)}

    def _collective(
        self, function: Callable[..., T], value: object, group: dist.ProcessGroup | None, *options: object
    ) -> T:
        with self._current_job.guard(function.__name__, group):
            return function(value, self.data_parallel_group if group is None else group, *options)

    # Every rank must call each collective, in the same order. A group of None is `data_parallel_group`.

    def all_reduce(
        self, tensor: T, group: dist.ProcessGroup | None = None, reduce_op: collectives.Reduction = "mean"
    ) -> T:
        """Reduce a tensor or a number over the ranks; see `rankwise.process_group.all_reduce`."""
        return self._collective(collectives.all_reduce, tensor, group, reduce_op)  # type: ignore[no-any-return]

    def all_gather(
        self, tensor: Any, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> Any:
        """Gather a tensor from every rank, as `(world_size, *)`; see `rankwise.process_group.all_gather`.

        Numbers and arrays are gathered on this rank's device.
        """
        tensors = collectives.to_tensors(tensor, self.root_device)
        return self._collective(collectives.all_gather, tensors, group, sync_grads)

    def gather_all_tensors(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Gather tensors of different sizes; see `rankwise.process_group.gather_all_tensors`."""
        return self._collective(collectives.gather_all_tensors, tensor, group)

    def all_gather_object(self, obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Gather anything picklable from every rank, in rank order."""
        return self._collective(objects.all_gather_object, obj, group)

    def gather_object(self, obj: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
        """Gather anything picklable from the group (by default all ranks) on rank `dst`; None elsewhere."""
        with self._current_job.guard("gather_object", group):
            return objects.gather_object(obj, dst, self.job_group if group is None else group)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank of the job has called this; `name` is for error messages."""
        with self._current_job.guard(f"barrier {name!r}" if name else "barrier"):
            collectives.barrier(self.job_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank of the job."""
        with self._current_job.guard("broadcast"):
            return objects.broadcast(obj, src, self.job_group)

    def call_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call `function`, without collectives, on global rank 0; return its value, or raise, everywhere."""
        value: Any = None
        with errors_shared(self, of_rank_zero=True):
            value = function() if self.is_global_zero else None
        return self.broadcast(value)  # type: ignore[no-any-return]  # what `function` has returned

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether all ranks (or, with `all=False`, any) of the job decided yes; the same on each."""
        counter = torch.tensor(int(decision), device=self.root_device)
        with self._current_job.guard("reduce_boolean_decision"):
            count = int(collectives.all_reduce(counter, self.job_group, "sum"))
        return count == self.world_size if all else count > 0

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return the block of `rankwise.process_group.rank_zero_first`: rank zero runs it first."""
        return rank_zero_first(local, ranks=self.ranks)

    def _check_not_in_job(self, call: str) -> None:
        if self.is_in_job:
            remedy = "a launched function calls what it needs directly: it runs on every rank already."
            raise self._wrong_state(call, "'bound'", remedy)

    def _wrong_state(
        self, call: str, needed: str, remedy: str = "call bind() or launch() first."
    ) -> LifecycleError:
        state = "in a job" if self.is_in_job else "bound" if self.is_bound else "configured"
        return LifecycleError(call=call, state=state, needed=needed, remedy=remedy)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the job and its results: they belong to this process."""
        return {**self.__dict__, "_job": None, "results": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'configured' if self._placement is None else self.ranks})"
