"""`RankwiseStrategy`: Lightning's `Trainer` on processes and process groups of rankwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from rankwise import strategies
from rankwise.integrations.lightning.fabric import OnRankwise, RankwiseLauncher
from rankwise.nested import to_device
from rankwise.process_group.distributed_optimizers import is_sharded
from rankwise.processes.memory_file import read_by_name
from rankwise.processes.returned_state import KnownToCaller, ReturnedState, StateBefore

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = (bool, int, float, str, type(None), _BaseProgress)


class TrainerLauncher(RankwiseLauncher):
    """Run the stages of a `Trainer` on every rank."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a stage; return its result, and bring the training state of worker processes back."""
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


class _NoSignalHandlers(_SignalConnector):
    """Leave signals to rankwise's supervisor, or to the launcher that has started the ranks.

    Lightning's handler of SIGTERM starts a collective, which hangs where other ranks are in another.
    """

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


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
    is_prediction = trainer.state.fn == TrainerFn.PREDICTING
    num_loaders = trainer.predict_loop.num_dataloaders if is_prediction and value is not None else 0
    state = None if before is None else _capture(trainer, before)
    return StageResult(to_device(value, "cpu"), num_loaders, state)


def known_to_lightning(trainer: Any, data_module: Any) -> KnownToCaller:
    """Return the objects of a stage that the calling process also has."""
    others = [*trainer.callbacks, *trainer.loggers, *([] if data_module is None else [data_module])]
    return KnownToCaller(
        trainer.lightning_module,
        {f"{type(each).__name__} ({number})": each for number, each in enumerate(others)},
        {"trainer": trainer, "strategy": trainer.strategy},
    )


def _capture(trainer: Any, before: StateBefore) -> ReturnedState:
    strategy = trainer.strategy
    is_fit = trainer.state.fn == TrainerFn.FITTING and not any(map(is_sharded, strategy.optimizers))
    parts: dict[str, Callable[[], Any]] = {
        # Counters and settings; the data of a loop belong to one stage.
        "loops": lambda: [
            {name: value for name, value in vars(loop).items() if isinstance(value, _PLAIN)}
            for loop in _loops(trainer)
        ],
        "metrics": lambda: {name: dict(getattr(trainer, name)) for name in _METRICS},
        "state": lambda: (trainer.state, trainer.should_stop),
    }
    if is_fit:
        parts["optimizers"] = lambda: (strategy.optimizers, strategy.lr_scheduler_configs)
    return ReturnedState(before, parts)


def restore_trainer(trainer: Any, data_module: Any, state: ReturnedState) -> None:
    """Give the objects of the calling process the worker's state; parameters stay the same objects."""
    give: dict[str, Callable[[Any], object]] = {
        "loops": partial(_restore_loops, trainer),
        "metrics": partial(_restore_metrics, trainer),
        "state": partial(_set, trainer, ("state", "should_stop")),
        "optimizers": partial(_set, trainer.strategy, ("optimizers", "lr_scheduler_configs")),
    }
    state.restore(known_to_lightning(trainer, data_module), give)
    if data_module is not None:
        trainer.datamodule = data_module


def _restore_loops(trainer: Any, loops: list[dict[str, Any]]) -> None:
    for loop, attributes in zip(_loops(trainer), loops, strict=True):
        vars(loop).update(attributes)


def _restore_metrics(trainer: Any, by_name: dict[str, dict[str, Any]]) -> None:
    for name, metrics in by_name.items():
        getattr(trainer, name).clear()
        getattr(trainer, name).update(metrics)


def _set(owner: object, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(owner, name, value)


@contextmanager
def optimizers_taken(trainer: Any) -> Iterator[None]:
    """Keep the optimizers of an earlier fit out of what is sent to worker processes, in the block."""
    strategy = trainer.strategy
    kept = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = kept


@final
class StageResult(NamedTuple):
    """The result of a stage in a worker process; on the first rank of a node with the state."""

    value: Any
    num_loaders: int  # over which it has predicted; 0 after another stage
    state: ReturnedState | None


def stage_value(results: list[StageResult]) -> Any:
    """Return the first rank's value, but the predictions of all ranks of this node.

    Predictions are by loader, in the order of ranks.
    """
    first = results[0]
    if first.num_loaders == 0:
        return first.value
    by_rank = [result.value for result in results]
    if first.num_loaders > 1:
        return [list(itertools.chain(*of_loader)) for of_loader in zip(*by_rank, strict=True)]
    return list(itertools.chain(*by_rank))


def _loops(trainer: Any) -> Iterator[Any]:
    """Yield the loops of a trainer and the loops in them, in the same order in every process."""
    left = [getattr(trainer, name) for name in reversed(_LOOPS)]
    while left:
        loop = left.pop()
        yield loop
        left += [each for each in vars(loop).values() if isinstance(each, _Loop)]
