"""What grows with the number of ranks: requests to the store and time, simulated in one process."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from torch.utils.data import RandomSampler, SequentialSampler

from benchmarks import simulated, supervised
from benchmarks.results import Result, Row
from benchmarks.sampling import Sampling
from rankwise.data import ShardedSampler
from rankwise.environments.slurm import expand_counts, expand_node_list

WORLDS = (512, 4096)
_NODES, _RANKS, _SAMPLES, _WORKERS = 10_000, 16_384, 10**9, 256
_DRAWN = 10**6  # samples that are shuffled, as 1e9 of them need 40 GB


def measure(sampling: Sampling) -> Result:
    """Measure all that can be simulated; once, as counts do not vary."""
    worlds = (32, 64) if sampling.is_quick else WORLDS
    rows: list[Row] = []
    for world_size in worlds:
        rows += store_rows(world_size)
    rows += [*node_list_rows(), *shard_rows(_DRAWN // 100 if sampling.is_quick else _DRAWN)]
    rows += supervisor_rows(8 if sampling.is_quick else _WORKERS)
    return Result("scale", rows)


def store_rows(world_size: int) -> list[Row]:
    """Return what ranks ask the store for, and the time per rank."""
    everyone = range(world_size)
    cases: dict[str, Callable[[], simulated.Simulation]] = {
        "rendezvous": partial(simulated.rendezvous, world_size),
        "stop agreement, one rank asks": partial(simulated.stop_agreement, world_size, [0]),
        "stop agreement, all ranks ask": partial(simulated.stop_agreement, world_size, everyone),
        "failure exchange": partial(simulated.failure_exchange, world_size),
        "report after a timeout": partial(simulated.status_report, world_size),
    }
    rows = []
    for name, simulate in cases.items():
        job = simulate()
        requests = sorted(traffic.requests for traffic in job.traffic)
        received = sorted(traffic.received for traffic in job.traffic)
        middle = job.observed // 2
        case = f"{name}, {world_size} ranks"
        rows += [
            Row(case, "requests of most ranks", requests[middle], "", None, 1),
            Row(case, "requests of the busiest rank", requests[-1], "", None, 1),
            Row(case, "KiB received by most ranks", received[middle] / 1024, "KiB", None, 1),
            Row(case, "time, divided by the ranks", job.seconds / job.observed * 1e3, "ms", None, 1),
        ]
    return rows


def supervisor_rows(workers: int) -> list[Row]:
    """Return what one supervisor takes for many workers on its node."""
    seconds = supervised.measure(workers)
    case = f"supervisor, {workers} workers on one node"
    return [
        Row(case, "to fork all of them", seconds["start"], "s", None, 1),
        Row(case, "a request while all send some", seconds["request"] * 1e3, "ms", None, 1),
        Row(case, "from a worker's death to the end of all", seconds["end"], "s", None, 1),
    ]


def node_list_rows() -> list[Row]:
    """Return how long it takes to read the node list of a large cluster, as a range and name by name."""
    names = random.Random(0).sample(range(100_000), _NODES)
    texts = {
        "one range": f"node[{1:05}-{_NODES:05}]",
        "single numbers": f"node[{','.join(f'{number:05}' for number in names)}]",
        "single names": ",".join(f"node{number:05}" for number in names),
    }
    case = f"Slurm node list, {_NODES} nodes"
    rows = [
        Row(case, name, _seconds(expand_node_list, text) * 1e3, "ms", None, 1) for name, text in texts.items()
    ]
    return [*rows, Row(case, "tasks per node", _seconds(expand_counts, f"8(x{_NODES})") * 1e3, "ms", None, 1)]


def _seconds(function: Callable[[str], object], text: str) -> float:
    begun = time.perf_counter()
    function(text)
    return time.perf_counter() - begun


def shard_rows(drawn: int) -> list[Row]:
    """Return what a rank's part of a data set costs: all of 1e9 samples in sequence, fewer if shuffled."""
    rows = []
    for title, sampler in {
        f"shard of {_SAMPLES:.0e} samples over {_RANKS} ranks, in sequence": SequentialSampler(
            range(_SAMPLES)
        ),
        f"shard of {drawn:.0e} samples over {_RANKS} ranks, shuffled": RandomSampler(range(drawn)),
    }.items():
        part = ShardedSampler(sampler, _RANKS, rank=1)
        begun = time.perf_counter()
        count = sum(1 for _ in part)
        seconds = time.perf_counter() - begun
        tracemalloc.start()  # which makes it slow
        sum(1 for _ in part)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows += [
            Row(title, "samples of a rank", count, "", None, 1),
            Row(title, "time for all of them", seconds, "s", None, 1),
            Row(title, "memory of Python objects", most / 2**20, "MiB", None, 1),
        ]
    return rows
