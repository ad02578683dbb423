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
from rankwise.integrations.lightning.names import create_strategy
from rankwise.integrations.lightning.processes import RankwiseLauncher, bind, check_in_job

_REMEDY = "def main(fabric): ..., with all of the training, and fabric.launch(main)."


class RankwiseFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy; rankwise starts the processes, connects them, and averages the gradients.

    `fabric.launch(function)` needs a function: it is what rankwise supervises.

    Args:
        strategy: a `rankwise.DDPStrategy`, or its name.
        checkpoint_io: Lightning's, as for its own strategies.
        precision: Lightning's, as for its own strategies.
        arguments: of the strategy that is named.

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
        precision: Any = None,
        **arguments: Any,
    ) -> None:
        self.rankwise = create_strategy(strategy, arguments)
        super().__init__(
            checkpoint_io=checkpoint_io,
            precision=precision,
            timeout=self.rankwise.timeout,
            **self.rankwise.ddp_kwargs,
        )

    def _set_world_ranks(self) -> None:
        self.cluster_environment = bind(
            self.rankwise, self.parallel_devices, self.num_nodes, self.cluster_environment
        )

    def _configure_launcher(self) -> None:
        self._launcher = FabricLauncher(self.rankwise)

    def _setup_distributed(self) -> None:
        check_in_job(self.rankwise, f"start the script with python or torchrun; {_REMEDY}")
        self._process_group_backend = self.rankwise.process_group_backend

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module, as `DDPStrategy.setup_module` of rankwise."""
        return self.rankwise.setup_module(module)


class FabricLauncher(RankwiseLauncher):
    """Run the function of `fabric.launch` on every rank."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on every rank; return the value of this process's rank, or of rank 0.

        Raises:
            LaunchRefusedError: when `fabric.launch()` was given no function.
        """
        if isinstance(function, partial) and function.args[0] is _do_nothing:
            raise LaunchRefusedError(
                message="fabric.launch() without a function cannot work: rankwise supervises a function.",
                remedy=_REMEDY,
            )
        return self._strategy.launch(_run, function, args, kwargs)


def _run(
    _: strategies.DDPStrategy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs)
