"""`RankwiseStrategy`: Lightning's `Trainer` on processes and process groups of rankwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn

from rankwise import strategies
from rankwise.integrations.lightning.names import create_strategy
from rankwise.integrations.lightning.processes import RankwiseLauncher, bind, check_in_job
from rankwise.integrations.lightning.worker_state import (
    KnownToCaller,
    StageResult,
    WorkerState,
    value_of,
)
from rankwise.processes.shared_memory import read_by_name


class RankwiseStrategy(LightningDDPStrategy):
    """Lightning's DDP strategy; rankwise starts the processes, connects them, and averages the gradients.

    A failure of any rank is raised as rankwise's own exception, with the traceback of the rank that failed
    first, after all other ranks have ended.

    Args:
        strategy: a `rankwise.DDPStrategy`, or its name.
        checkpoint_io: Lightning's, as for its own strategies.
        precision_plugin: Lightning's, as for its own strategies.
        arguments: of the strategy that is named, such as `start_method`, `timeout`, `comm_hook` and
            `find_unused_parameters`.

    Attributes:
        rankwise: the strategy of rankwise.

    Raises:
        ConfigurationError: for options that cannot have an effect in Lightning's loops.
        RankwiseError: as the constructor of the named strategy.
    """

    cluster_environment: Any  # Lightning sets it

    def __init__(
        self,
        strategy: strategies.DDPStrategy | str = "ddp",
        *,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **arguments: Any,
    ) -> None:
        self.rankwise = create_strategy(strategy, arguments)
        super().__init__(
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            timeout=self.rankwise.timeout,
            **self.rankwise.ddp_kwargs,
        )

    def set_world_ranks(self) -> None:
        """Determine the ranks. Lightning calls it when it has the devices."""
        self.cluster_environment = bind(
            self.rankwise, self.parallel_devices, self.num_nodes, self.cluster_environment
        )

    def _configure_launcher(self) -> None:
        self._launcher = TrainerLauncher(self.rankwise)

    def setup_distributed(self) -> None:
        """Take over the process group, which exists already."""
        check_in_job(self.rankwise, "call a method of the Trainer, such as fit().")
        reset_seed()
        self._process_group_backend = self.rankwise.process_group_backend

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.rankwise.job.cleanup.callback(self._unwrap)
        return self.rankwise.setup_module(model)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: rankwise has registered its own."""

    def _unwrap(self) -> None:
        self.model = self.lightning_module


class TrainerLauncher(RankwiseLauncher):
    """Run the stages of a `Trainer` on every rank."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a stage; in worker processes, bring the training state back.

        Returns:
            What the stage returns: of this process's rank, or of rank 0. Predictions of worker processes are
            those of all ranks of this node, one rank after another.
        """
        strategy = self._strategy
        if not strategy.placement.environment.creates_processes_externally:
            trainer._signal_connector = _NoSignalHandlers(trainer)
        if strategy.runs_in_caller:
            value: list[Any] = []
            strategy.launch(lambda _: value.append(function(*args, **kwargs)))
            return value[0]
        with read_by_name(KnownToCaller(trainer).named):
            strategy.launch(_run_in_worker, trainer, function, args, kwargs)
        results = [result for _, result in sorted(strategy.results.items())]
        results[0].state.restore(trainer)
        return value_of(results)


def _run_in_worker(
    strategy: strategies.DDPStrategy,
    trainer: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StageResult:
    known = KnownToCaller(trainer)
    value = function(*args, **kwargs)
    state = WorkerState(trainer, known) if strategy.local_rank == 0 else None
    return StageResult.of(trainer, value, state)


class _NoSignalHandlers(_SignalConnector):
    """Leave signals to rankwise's supervisor: Lightning's handler would start a collective in the handler."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
