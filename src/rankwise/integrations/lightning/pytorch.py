"""`RankwiseStrategy`: Lightning's `Trainer` on processes and process groups of rankwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn

from rankwise import strategies
from rankwise.integrations.lightning.processes import OnRankwise, RankwiseLauncher
from rankwise.integrations.lightning.state_transfer import (
    StageResult,
    known_to_lightning,
    optimizers_taken,
    restore_trainer,
    stage_value,
)
from rankwise.processes.memory_file import read_by_name
from rankwise.processes.returned_state import StateBefore


class TrainerLauncher(RankwiseLauncher):
    """Run the stages of a `Trainer` on every rank."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a stage; in worker processes, bring the training state back.

        Returns:
            The result of the stage, of this process's rank or of rank 0. Predictions of worker processes are
            the predictions of all ranks of this node, one rank after another.
        """
        strategy = self._strategy
        if not _has_lightnings_requeueing(trainer, strategy):
            trainer._signal_connector = _NoSignalHandlers(trainer)
        if strategy.runs_in_caller:
            value: list[Any] = []
            strategy.launch(lambda _: value.append(function(*args, **kwargs)))
            return value[0]
        data_module = _data_module(trainer, *args, *kwargs.values())
        with optimizers_taken(trainer), read_by_name(known_to_lightning(trainer, data_module).named):
            strategy.launch(_run_in_worker, trainer, function, args, kwargs)
        results = [result for _, result in sorted(strategy.results.items())]
        restore_trainer(trainer, data_module, results[0].state)
        return stage_value(results)


class RankwiseStrategy(OnRankwise, LightningDDPStrategy):
    """The Trainer's DDP strategy on rankwise. `OnRankwise` documents arguments, attributes and errors.

    A failure of any rank is raised as rankwise's own exception, with the traceback of the rank that failed
    first, after all other ranks have ended.
    """

    precision_argument = "precision_plugin"
    launcher_type = TrainerLauncher

    def set_world_ranks(self) -> None:
        """Determine the ranks. Lightning calls it when it has the devices."""
        self.bind_rankwise()

    def setup_distributed(self) -> None:
        """Take over the process group, which exists already."""
        self.check_in_job("call a method of the Trainer, such as fit().")
        reset_seed()
        self._process_group_backend = self.rankwise.process_group_backend

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.rankwise.job.cleanup.callback(self._unwrap)
        return self.rankwise.setup_module(model)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: rankwise has registered its own."""

    def _unwrap(self) -> None:
        self.model = self.lightning_module


def _data_module(trainer: Any, *arguments: Any) -> LightningDataModule | None:
    """Return the data module of a stage, in whichever place it was given, or of an earlier one."""
    return next((each for each in arguments if isinstance(each, LightningDataModule)), trainer.datamodule)


def _has_lightnings_requeueing(trainer: Any, strategy: strategies.DDPStrategy) -> bool:
    """Return whether Slurm has started the ranks, and Lightning is to act on its signals."""
    environment = trainer._accelerator_connector.cluster_environment
    is_external = strategy.placement.environment.creates_processes_externally
    return is_external and isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def _run_in_worker(
    strategy: strategies.DDPStrategy,
    trainer: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StageResult:
    known = known_to_lightning(trainer, _data_module(trainer, *args, *kwargs.values()))
    before = StateBefore(known) if trainer.local_rank == 0 else None
    value = function(*args, **kwargs)
    return StageResult.of(trainer, value, before)


class _NoSignalHandlers(_SignalConnector):
    """Leave signals to rankwise's supervisor, or to the launcher that has started the ranks.

    Lightning's handler of SIGTERM starts a collective, which hangs where other ranks are in another.
    """

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
