"""`check_strategy`: the contract of a strategy, checked in jobs of it."""

from __future__ import annotations

import tempfile
from typing import NoReturn

from rankwise.checks import check_is_a
from rankwise.errors import WorkerRaisedError
from rankwise.strategies import Strategy
from rankwise.testing.contract import Contract, expect, expect_equal, expect_error
from rankwise.testing.running import run_on, within
from rankwise.testing.strategy_rules import problems_on_rank


def check_strategy(
    strategy: Strategy, *, exact: bool = True, tolerance: float = 1e-6, timeout: float = 120.0
) -> None:
    """Check that a strategy does what the rest of rankwise relies on; it needs a few launches.

    Runs on: the main process; in a script whose strategy runs it again, every rank calls this.

    Args:
        strategy: with the devices to check it on, two or more where it can have them. It stays as it is.
        exact: whether training must give the weights of one process on the same global batches. Otherwise all
            ranks must only end with the same weights.
        tolerance: the largest difference between these weights.
        timeout: seconds for each launch, unless torch's elastic agent starts the ranks.

    Raises:
        ContractError: with a line for each rule that the strategy breaks.
        WorkerError: when a rank does not get through, with the tracebacks of all ranks.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_is_a("strategy", strategy, Strategy)
    contract = Contract()
    _check_copies(contract, strategy)
    with tempfile.TemporaryDirectory() as folder:
        limit = tolerance if exact else None
        for problems in run_on(within(timeout, strategy), problems_on_rank, folder, limit):
            contract.problems += problems
    _check_next_launch(contract, within(timeout, strategy))
    contract.check(strategy)


def _check_copies(contract: Contract, strategy: Strategy) -> None:
    with contract.rule("with_() returns another strategy of its class, not bound, and changes nothing"):
        before = dict(vars(strategy))
        derived = strategy.with_(timeout=7)
        expect_equal((type(derived), derived.is_bound, derived.timeout.seconds), (type(strategy), False, 7))
        expect(derived is not strategy, "it is the same one")
        expect_equal(vars(strategy), before)


def _check_next_launch(contract: Contract, strategy: Strategy) -> None:
    """Check a second launch; where ranks are processes of their own, one of them fails."""
    ranks = strategy.bind()
    last = ranks.global_rank + ranks.local_world_size - 1
    if strategy.runs_in_caller:
        with contract.rule("the next launch works too"):
            expect(strategy.global_rank in run_on(strategy, _rank), "the values are not the ranks'")
        return
    with contract.rule("the failure of a rank is raised, by its number and with its traceback"):
        with expect_error(WorkerRaisedError, f"global_rank={last}", "in _fail_on"):
            run_on(strategy, _fail_on, last)
        expect_equal(strategy.results, {})


def _rank(strategy: Strategy) -> int:
    return strategy.global_rank


def _fail_on(strategy: Strategy, rank: int) -> NoReturn:
    if strategy.global_rank == rank:
        raise ValueError("a failure for the test")
    strategy.barrier()
    raise AssertionError("the barrier has returned without a rank")
