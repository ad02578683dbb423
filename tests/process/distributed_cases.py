"""Tests with the marker `distributed`, some of which fail: pytest runs them in a process of its own."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from rankwise.strategies import DDPStrategy


@pytest.fixture
def numbers() -> list[int]:
    return [1, 2]


@pytest.mark.distributed
def test_passes(numbers: list[int], rank_strategy: DDPStrategy) -> None:
    numbers.append(rank_strategy.global_rank)
    assert rank_strategy.all_reduce(torch.tensor(float(numbers[-1])), reduce_op="sum") == 1


class TestMethod:
    @pytest.mark.distributed(world_size=1)
    def test_passes(self, numbers: list[int]) -> None:
        assert numbers == [1, 2]  # what a rank appended has stayed there
        assert dist.get_world_size() == 1


@pytest.mark.distributed
def test_fails(numbers: list[int], rank_strategy: DDPStrategy) -> None:
    print(f"printed by rank {rank_strategy.global_rank}")
    rank_strategy.barrier()
    if rank_strategy.global_rank == 1:
        assert {"one": 1, "numbers": numbers} == {"one": 1, "numbers": [1, 3]}
    rank_strategy.barrier()


@pytest.mark.distributed
def test_is_killed(rank_strategy: DDPStrategy) -> None:
    if rank_strategy.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank_strategy.barrier()


@pytest.mark.distributed
def test_is_skipped() -> None:
    pytest.skip("not here")


@pytest.mark.distributed
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_is_expected_to_fail() -> None:
    1 / 0  # noqa: B018 -- raises


@pytest.mark.distributed(world_size=0)
def test_is_impossible() -> None:
    """Never runs."""


def test_without_marker(rank_strategy: DDPStrategy) -> None:
    """Never runs."""
