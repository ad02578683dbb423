"""`RankwiseFabricStrategy`: Lightning's `Fabric` on processes and process groups of rankwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.fabric import _do_nothing
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from torch import nn

from rankwise import strategies
from rankwise.errors import LaunchRefusedError
from rankwise.integrations.lightning.processes import OnRankwise, RankwiseLauncher
from rankwise.strategies.open_job import begin_job

_REMEDY = "def main(fabric): ..., with all of the training, and fabric.launch(main)"


class FabricLauncher(RankwiseLauncher):
    """Run the function of `fabric.launch` on every rank; without one, the rest of the script."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on every rank; return the value of this process's rank, or of rank 0.

        Raises:
            LaunchRefusedError: when `fabric.launch()` was given no function, and processes are started that
                run a function only.
        """
        strategy = self._strategy
        is_rest_of_script = isinstance(function, partial) and function.args[0] is _do_nothing
        if not is_rest_of_script:
            return strategy.launch(_run, function, args, kwargs)
        if not strategy.runs_in_caller:
            raise LaunchRefusedError(
                message="fabric.launch() needs the function that is to run in the processes that it starts.",
                facts=f"{type(strategy).__name__}, start_method={strategy.start_method!r}.",
                remedy=f'{_REMEDY}; or use strategy="rankwise_ddp" in a script, or torchrun.',
            )
        if not strategy.is_in_job:
            begin_job(strategy)
        return function(*args, **kwargs)


class RankwiseFabricStrategy(OnRankwise, FabricDDPStrategy):
    """Fabric's DDP strategy on rankwise. `OnRankwise` documents arguments, attributes and errors."""

    precision_argument = "precision"
    launcher_type = FabricLauncher

    def _set_world_ranks(self) -> None:
        self.bind_rankwise()

    def _setup_distributed(self) -> None:
        self.check_in_job(f"start the script with python or torchrun; {_REMEDY}.")
        self._process_group_backend = self.rankwise.process_group_backend

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module, as `DDPStrategy.setup_module` of rankwise."""
        return self.rankwise.setup_module(module)


def _run(
    _: strategies.DDPStrategy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs)
