"""Ranks that do not meet, and process groups that exist already."""

import socket
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from rankwise import DDPStrategy, Strategy
from rankwise.environments import PlainEnvironment, detect_environment
from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.lightning.utilities import init_dist_connection
from rankwise.process_group import all_reduce, init_process_group, join_process_group
from rankwise.ranks import RankInfo, rank_zero_only
from tests.process.helpers import ddp


def test_nobody_at_the_main_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot reach rank 0 raises an error with the address after init_timeout."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a process that is a rank for good keeps
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    environment = PlainEnvironment({**values, "MASTER_PORT": str(port)})
    strategy = DDPStrategy(cluster_environment=environment, devices=2, init_timeout=1)
    with pytest.raises(RendezvousTimeoutError, match=f"127.0.0.1:{port}"):
        strategy.launch(lambda _: None)


def in_a_group_of_one(strategy: Strategy) -> None:
    """Make a group, and join it as the only rank, and as one of two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    join = partial(join_process_group, dist.HashStore(), backend="gloo", device=torch.device("cpu"))
    try:
        join(RankInfo(0, 0, 0, 1, 1, 1), timeout=timedelta(seconds=5))
        assert dist.get_world_size() == 1
        with pytest.raises(ProcessGroupError, match=r"rank 0 of 1\b.* global_rank 0 of 2\b"):
            join(RankInfo(0, 0, 0, 2, 2, 1), timeout=timedelta(seconds=5))
    finally:
        dist.destroy_process_group()


def test_a_group_that_exists() -> None:
    """A default group with the same ranks and back end is used; another size is an error with both sizes."""
    DDPStrategy(start_method="fork", devices=1).launch(in_a_group_of_one, init_process_group=False)


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
