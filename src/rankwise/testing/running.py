"""`run_distributed`: run a function on several ranks, within a limit of time, for a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rankwise.checks import check_callable, check_choice, check_is_a, check_minimum, check_value
from rankwise.errors import WorkerError
from rankwise.strategies import DDPElasticStrategy, DDPStrategy, Strategy

T = TypeVar("T")
S = TypeVar("S", bound=Strategy)

START_METHODS = ("fork", "spawn", "forkserver")
"""The start methods that run a function of the calling process."""


def run_distributed(
    function: Callable[..., T],
    *args: Any,
    world_size: int = 2,
    timeout: float = 60.0,
    start_method: str = "fork",
    accelerator: str = "cpu",
) -> list[T]:
    """Run `function(strategy, *args)` on every rank of a new job; return all values in rank order.

    The ranks have a process group: collectives of `torch.distributed` and of the strategy work. No process is
    left when the call returns or raises.

    Args:
        function: the function to run. With `"fork"` it may be a lambda or a closure.
        args: its further arguments.
        world_size: the number of ranks, all on this node.
        timeout: seconds for the whole job. When they are over, the ranks write their stacks to stderr and are
            killed.
        start_method: `"fork"` (ranks begin with what this process has imported), `"spawn"` or
            `"forkserver"`.
        accelerator: `"cpu"` or `"cuda"`; CUDA needs `"spawn"` or `"forkserver"` if this process uses it.

    Raises:
        WorkerError: the first rank's failure. Its text has the tracebacks of all ranks: how they failed, or
            where they were when they were stopped.
        WorkerTimedOutError: when the job took longer than `timeout`.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_callable("function", function)
    return run_on(new_strategy(world_size, timeout, start_method, accelerator), function, *args)


def new_strategy(
    world_size: int, timeout: float, start_method: str = "fork", accelerator: str = "cpu"
) -> DDPStrategy:
    """Return a strategy with so many ranks on this node, also under a launcher such as srun."""
    check_is_a("world_size", world_size, int)
    check_minimum("world_size", world_size, 1)
    check_choice("start_method", start_method, START_METHODS)
    strategy = DDPStrategy(
        accelerator=accelerator, devices=world_size, start_method=start_method, cluster_environment="local"
    )
    return within(timeout, strategy)


def within(timeout: float, strategy: S) -> S:
    """Return such a strategy whose launches may take so many seconds; torch's agent keeps no limit."""
    check_is_a("timeout", timeout, (int, float), "a number of seconds")
    check_value("timeout", timeout, timeout > 0, "more than 0 seconds")
    changes = {} if isinstance(strategy, DDPElasticStrategy) else {"time_limit": timeout}
    return strategy.with_(**changes)


def run_on(strategy: Strategy, function: Callable[..., T], *args: Any) -> list[T]:
    """Launch a function; return the local ranks' values in rank order. A failure shows all tracebacks."""
    try:
        strategy.launch(function, *args)
    except WorkerError as error:
        error.shows_others = True
        raise
    return [strategy.results[rank] for rank in sorted(strategy.results)]
