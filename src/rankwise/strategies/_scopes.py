"""What a job changes in its process, each for as long as a block lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rankwise.ranks import set_rank_zero_only

# torch sets this one when the first optimizer or wrapper imports its compiler.
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables in the block, and those of before after it."""
    before = {name: os.environ.get(name) for name in (*variables, _SET_BY_TORCH)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def rank_zero_set(global_rank: int) -> Iterator[None]:
    """Have `rank_zero_only` know this rank in the block."""
    before = set_rank_zero_only(global_rank)
    try:
        yield
    finally:
        set_rank_zero_only(before)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if "sched_getaffinity" in os.__dict__:  # Linux; elsewhere a process cannot be kept to some of the cores
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads_shared_by(local_world_size: int) -> Iterator[None]:
    """Share this machine's cores between the local ranks, unless `OMP_NUM_THREADS` says otherwise."""
    before = torch.get_num_threads()
    if local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(before, usable_cores() // local_world_size)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
