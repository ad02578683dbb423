"""Ranks that do not meet, and process groups that exist already."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankwise import DDPStrategy, Strategy
from rankwise.environments import PlainEnvironment, detect_environment
from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.lightning.utilities import init_dist_connection
from rankwise.process_group import all_reduce, init_process_group, join_process_group
from rankwise.ranks import rank_zero_only
from tests.process.helpers import ddp


def second_of_two(port: int) -> PlainEnvironment:
    """Return the environment of a rank whose rank 0 should be at `port`."""
    values = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    return PlainEnvironment({**values, "MASTER_PORT": str(port)})


def test_nobody_at_the_main_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot reach rank 0 raises an error with the address after init_timeout."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a process that is a rank for good keeps
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    strategy = DDPStrategy(cluster_environment=second_of_two(port), devices=2, init_timeout=1)
    with pytest.raises(RendezvousTimeoutError, match=f"127.0.0.1:{port}"):
        strategy.launch(world_size)


def world_size(strategy: Strategy) -> int:
    """Return the group's size."""
    return dist.get_world_size()


def in_a_group_of_one(strategy: Strategy, world: int) -> int:
    """Make a group, then let another strategy use it, which asks for `world` ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        environment = PlainEnvironment(
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "1",
            }
        )
        inner = DDPStrategy(cluster_environment=environment)
        inner.bind()
        join_process_group(
            dist.HashStore(),
            inner.ranks,
            "gloo",
            torch.device("cpu"),
            timeout=timedelta(seconds=5),
            init_timeout=timedelta(seconds=5),
        )
        return dist.get_world_size()
    finally:
        dist.destroy_process_group()


def test_a_group_that_fits_is_used() -> None:
    """A default group with the same ranks and back end is used."""
    strategy = DDPStrategy(start_method="fork", devices=1)
    assert strategy.launch(in_a_group_of_one, 1, init_process_group=False) == 1


def test_a_group_that_does_not_fit_is_refused() -> None:
    """A default group with another size is an error with both sizes."""
    strategy = DDPStrategy(start_method="fork", devices=1)
    with pytest.raises(RuntimeError, match=ProcessGroupError.__name__) as caught:
        strategy.launch(in_a_group_of_one, 2, init_process_group=False)
    assert "rank 0 of 1" in str(caught.value)
    assert "global_rank 0 of 2" in str(caught.value)


def connect_by_hand(strategy: DDPStrategy) -> float:
    """Connect by the environment's variables; add up the ranks."""
    try:
        ranks = init_process_group(timeout=timedelta(seconds=30))
        environment = detect_environment().environment
        assert init_process_group(environment) == ranks
        init_dist_connection(cluster_environment=environment, torch_distributed_backend="gloo")
        return all_reduce(torch.tensor(float(ranks.global_rank)), None, "sum").item()
    finally:
        dist.destroy_process_group()


def test_init_process_group() -> None:
    """A program without a strategy connects by its environment alone; a second call finds the group.

    Often, because torch 2.6 may wait for ever when a program destroys a group that has just worked.
    """
    strategy = ddp("fork", "tcp")
    for _ in range(5):
        assert strategy.launch(connect_by_hand, init_process_group=False) == 1.0
