"""`check_launcher`: the contract of a launcher, checked in jobs of a strategy that uses it."""

from __future__ import annotations

import os
import time

import torch

from rankwise.checks import check_is_a
from rankwise.errors import WorkerError
from rankwise.strategies import Strategy
from rankwise.testing.contract import Contract, expect, expect_equal, expect_error
from rankwise.testing.running import run_on, within

_SETTLE_S = 0.3


def check_launcher(strategy: Strategy, *, timeout: float = 60.0) -> None:
    """Check that a launcher runs a function once as each local rank, and reports the rank that fails.

    `check_strategy` also checks what the ranks do together.

    Args:
        strategy: one that uses the launcher, with two ranks or more. It stays as it is.
        timeout: seconds for each launch.

    Raises:
        ContractError: with a line for each rule that the launcher breaks.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_is_a("strategy", strategy, Strategy)
    contract = Contract()
    launched = within(timeout, strategy)
    ranks = launched.bind()
    expected = list(range(ranks.global_rank, ranks.global_rank + ranks.local_world_size))
    shared = torch.zeros(ranks.world_size)
    with contract.rule("a function runs once as each rank; its values are returned by global rank"):
        values = dict(enumerate(run_on(launched, _facts_on_rank, shared), start=expected[0]))
        expect_equal(sorted(launched.results), expected)
        expect_equal([rank for rank, *_ in values.values()], expected)
        expect_equal([variable for _, variable, *_ in values.values()], [str(rank) for rank in expected])
    if not launched.runs_in_caller:
        with contract.rule("each rank is a process of its own"):
            pids = {os.getpid(), *(launched.results[rank][2] for rank in launched.results)}
            expect_equal(len(pids), len(expected) + 1)
        with contract.rule("each rank has memory of its own: a tensor is copied, not shared"):
            expect_equal([launched.results[rank][3] for rank in launched.results], [1.0] * len(expected))
            expect_equal(float(shared.sum()), 0.0)
        with (
            contract.rule("a rank that raises is a WorkerError with its number and its traceback"),
            expect_error(WorkerError, f"global_rank={expected[-1]}", "in _fail_alone"),
        ):
            run_on(within(timeout, strategy), _fail_alone, expected[-1])
    contract.check(strategy)


def _facts_on_rank(strategy: Strategy, memory: torch.Tensor) -> tuple[int, str, int, float]:
    memory[strategy.global_rank] += 1
    time.sleep(_SETTLE_S)  # so that a rank that shares the memory has written to it
    return strategy.global_rank, os.environ["RANK"], os.getpid(), float(memory.sum())


def _fail_alone(strategy: Strategy, rank: int) -> None:
    expect(strategy.global_rank != rank, "a failure for the test")
