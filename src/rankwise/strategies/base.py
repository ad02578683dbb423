"""`Strategy`: how training is distributed. Configuration until it is bound, then a job's life."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.errors import LifecycleError
from rankwise.gradient_sync import GradientSync
from rankwise.launchers import Launcher
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import report_phase
from rankwise.precision import Precision
from rankwise.processes.exit_codes import exit_code_kept
from rankwise.ranks import RankInfo, set_rank_zero_only
from rankwise.strategies._around_module import AroundModule
from rankwise.strategies._gradient_sync import Gradients
from rankwise.strategies._saving import Saving
from rankwise.strategies._state import State
from rankwise.strategies.config import check_instance
from rankwise.strategies.job import RankEntry, rank_zero_set, variables_set
from rankwise.strategies.module_wrapping import forward_redirect, uncompiled
from rankwise.strategies.placement import (
    check_devices,
    check_environment,
    check_num_nodes,
    check_world,
    device_type,
    find_environment,
    local_devices,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Strategy"]

T = TypeVar("T")
Devices = int | str | list[int] | tuple[int, ...]


class Strategy(AroundModule, Gradients, Saving):
    """Start the processes, connect them, wrap the model, synchronise, clean up.

    A strategy is plain configuration until `bind` gives it devices, nodes and an environment, once. Then
    `launch` runs a function on every rank, again and again; within it the rest of the methods work.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        devices: processes on this node: a number, `"auto"` (or -1) for all that fit, or device indices.
        num_nodes: how many nodes, `"auto"` for as many as the environment has.
        cluster_environment: an instance or a name; detected where it is None.
        precision: the precision plug-in.
        checkpoint_io: where checkpoints go.

    Raises:
        InvalidArgumentError, InvalidTypeError, UnknownNameError: for arguments that cannot work.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int | Literal["auto"] = "auto",
        cluster_environment: ClusterEnvironment | str | None = None,
        precision: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        check_devices(devices)
        check_num_nodes(num_nodes)
        self.precision = Precision() if precision is None else precision
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        check_instance("precision", self.precision, Precision)
        check_instance("checkpoint_io", self.checkpoint_io, CheckpointIO)
        self.gradients = GradientSync()
        self.results: dict[int, Any] = {}
        self._accelerator = accelerator
        self._devices = devices
        self._num_nodes = num_nodes
        self._wanted_environment = check_environment(cluster_environment)
        self._state = State.CONFIGURED
        self._environment: ClusterEnvironment | None = None
        self._ranks: RankInfo | None = None
        self._local_devices: list[torch.device] = []
        self._launcher: Launcher | None = None
        self._worker: WorkerContext | None = None
        self._job = ExitStack()
        self._is_group_wanted = True

    # ------------------------------------------------------------------ binding

    def bind(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int | Literal["auto"] = "auto",
        environment: ClusterEnvironment | str | None = None,
    ) -> RankInfo:
        """Fix devices, nodes and environment, once. What is left at its default comes from the constructor.

        Runs on: every process of the job; starts none.

        Returns:
            This process's ranks. A main process that is no rank itself has those of local rank 0.

        Raises:
            LifecycleError: when the strategy is bound already.
            InvalidArgumentError, InvalidTypeError, UnknownNameError: for arguments that cannot work.
            EnvironmentVariableError: when a launcher's variables are wrong.
            WorldSizeMismatchError: when other processes exist than were asked for.
        """
        if self.is_bound:
            raise LifecycleError(
                call="bind()",
                state=self._state.value,
                needed="'configured'",
                remedy="create another strategy.",
            )
        kind = device_type(self._accelerator if accelerator == "auto" else accelerator)
        wanted_devices = check_devices(self._devices if devices == "auto" else devices)
        wanted_nodes = check_num_nodes(self._num_nodes if num_nodes == "auto" else num_nodes)
        found, how = find_environment(check_environment(environment) or self._wanted_environment)
        self._local_devices = local_devices(kind, wanted_devices, found.processes_per_node)
        self._environment = found
        if not found.creates_processes_externally:
            self._ranks = self._place_locally(len(self._local_devices), wanted_nodes)
        else:
            self._ranks = found.ranks
            check_world(
                found, how, None if wanted_devices is None else len(self._local_devices), wanted_nodes
            )
        found.validate_settings(self._ranks.local_world_size, self._ranks.num_nodes)
        self._launcher = self._create_launcher(found)
        if found.creates_processes_externally or self._ranks.node_rank > 0:
            set_rank_zero_only(self._ranks.global_rank)  # this process is that rank as long as it lives
        self._state = State.BOUND
        return self._ranks

    @abstractmethod
    def _place_locally(self, local_world_size: int, num_nodes: int | None) -> RankInfo:
        """Return this process's ranks where no outer launcher has given it any; refuse what cannot be."""

    @abstractmethod
    def _create_launcher(self, environment: ClusterEnvironment) -> Launcher:
        """Return the launcher that fits this strategy here."""

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._state is not State.CONFIGURED

    @property
    def environment(self) -> ClusterEnvironment:
        """Who started this process."""
        if self._environment is None:
            raise self._not_yet("environment")
        return self._environment

    @property
    def ranks(self) -> RankInfo:
        """Who this process is; in a main process that is no rank itself, local rank 0's."""
        if self._ranks is None:
            raise self._not_yet("ranks")
        return self._ranks

    @property
    def launcher(self) -> Launcher:
        """What starts the processes."""
        if self._launcher is None:
            raise self._not_yet("launcher")
        return self._launcher

    @property
    def global_rank(self) -> int:
        """This process's id in the whole job."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """This process's id on its node."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """The id of this node."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.ranks.world_size

    @property
    def local_world_size(self) -> int:
        """The number of processes on this node."""
        return self.ranks.local_world_size

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.ranks.num_nodes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is global rank 0, or the main process that stands for it."""
        return self.ranks.is_global_zero

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        return self._local_devices[self.ranks.local_rank]

    @property
    def runs_in_caller(self) -> bool:
        """Whether the calling process is a rank itself, so that training changes its own objects."""
        return self.launcher.runs_in_caller

    @property
    def needs_pickling(self) -> bool:
        """Whether what is launched travels as a pickle."""
        return self.launcher.pickles_entry

    # ------------------------------------------------------------------ a job

    def launch(
        self, function: Callable[..., T], *args: Any, init_process_group: bool = True, **kwargs: Any
    ) -> T:
        """Run `function(strategy, *args, **kwargs)` once per rank.

        Binds the strategy first if nobody has.

        Args:
            function: what to run.
            args: its further arguments.
            init_process_group: False leaves the process group to the function: every rank sees torchrun's
                variables, and `torch.distributed.init_process_group("env://")` works.
            kwargs: its keyword arguments.

        Returns:
            Global rank 0's value (on another node: the first local rank's). `results` has every local
            rank's, by global rank.

        Raises:
            WorkerError: when a rank failed; every other one is gone by then.
            LifecycleError: from within a job of the same strategy.
            LaunchRefusedError, NotPicklableError: when nothing could be started.
        """
        if not self.is_bound:
            self.bind()
        if self._state is State.IN_JOB:
            raise LifecycleError(
                call="launch()",
                state=self._state.value,
                needed="'bound'",
                remedy="a launched function calls what it needs directly: it runs on every rank already.",
            )
        self.results = {}
        self._is_group_wanted = init_process_group
        entry = RankEntry(self, function, args, kwargs)
        with exit_code_kept():
            self.results = self.launcher.launch(entry, entry.described(), self._rendezvous_of_launch())
        value: T = self.results[min(self.results)]
        return value

    def _rendezvous_of_launch(self) -> str:
        return "private"

    def attach(self, worker: WorkerContext) -> None:
        """Become the rank that `worker` says; called by the launcher's side."""
        self._worker = worker
        self._ranks = worker.ranks
        self._state = State.IN_JOB

    def setup_environment(self) -> None:
        """Prepare this process: its variables, `rank_zero_only`. Subclasses connect to the others here.

        Mutates: `os.environ`, until `teardown`.
        """
        self._job.enter_context(variables_set(self.worker.variables))
        self._job.enter_context(rank_zero_set(self.ranks.global_rank))
        self.precision.device_type = self.root_device.type
        if self.root_device.type == "cuda":
            torch.cuda.set_device(self.root_device)

    def teardown(self) -> None:
        """Leave this process as it was before `setup_environment`."""
        try:
            self._job.close()
        finally:
            self._job = ExitStack()
            self._worker = None
            self._state = State.BOUND

    @property
    def worker(self) -> WorkerContext:
        """This rank's context in the current job."""
        if self._worker is None:
            raise self._not_yet("worker", "'in a job'")
        return self._worker

    # ------------------------------------------------------------------ the model

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device and make it ready to train; return what to call."""
        module = self.module_to_device(self.precision.convert_module(module))
        self.gradients.prepare(module)
        return module

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device, in place."""
        return module.to(self.root_device)

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        """Return the user's module from what `setup_module` returned."""
        return uncompiled(module)

    def call_method(self, wrapped: nn.Module, method: str, *args: Any) -> Any:
        """Run a method of the user's module through the wrapper, as its forward pass."""
        return forward_redirect(wrapped, self.unwrap_module(wrapped), method, *args)

    def batch_to_device(self, batch: T) -> T:
        """Move every tensor of a batch (nested as it may be) to this rank's device."""
        device = self.root_device
        moved: T = apply_to_collection(
            batch, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), allow_frozen=True
        )
        return moved

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients; `options` are those of `Tensor.backward`."""
        report_phase("backward", waits=True)
        self.precision.backward(loss, **options)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let an optimizer step once; return what its `step` returns."""
        report_phase("optimizer")
        return self.precision.optimizer_step(optimizer, closure)

    def on_after_setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Do something with the optimizers once they exist; for overriding."""

    # ------------------------------------------------------------------ state

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state; its keys never carry a wrapper's prefix."""
        return self.unwrap_module(module).state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load what `get_module_state_dict` returned, in place."""
        self.unwrap_module(module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state."""
        return optimizer.state_dict()

    # ------------------------------------------------------------------ internals

    def _not_yet(self, what: str, needed: str = "'bound'") -> LifecycleError:
        return LifecycleError(
            call=what, state=self._state.value, needed=needed, remedy="call bind() or launch() first."
        )

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to the launching process alone."""
        return {**self.__dict__, "_launcher": None, "_worker": None, "_job": None, "results": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._job = ExitStack()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ranks if self.is_bound else self._state.value})"
