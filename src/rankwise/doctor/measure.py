"""Collect facts on every rank, measure all-reduces, and describe both."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

import torch
import torch.distributed as dist

from rankwise.doctor.machine import versions
from rankwise.doctor.network import lookup_seconds
from rankwise.doctor.report import Finding, Section, table
from rankwise.strategies import Strategy

SIZES = (4, 4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
"""Bytes per tensor: from a flag to a little more than a bucket of DDP (25 MiB)."""
_REPEATS = 10
_WARM_UP = 2


@final
@dataclass(frozen=True)
class RankFacts:
    """What one rank reports about itself."""

    global_rank: int
    node_rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    device_name: str
    threads: int
    versions: Mapping[str, str]
    lookup_seconds: float


@final
@dataclass(frozen=True)
class Measurement:
    """All-reduces of one size: median time, bandwidth of a link, and whether all sums were right."""

    size: int
    seconds: float
    bytes_per_second: float
    is_right: bool


@final
@dataclass(frozen=True)
class JobFacts:
    """What rank 0 reports about a job."""

    backend: str | None
    ranks: tuple[RankFacts, ...]
    measurements: tuple[Measurement, ...]


def measure(strategy: Strategy) -> JobFacts:
    """Gather every rank's facts and measure all-reduces.

    Collective: every rank must call this.
    """
    ranks = strategy.all_gather_object(_rank_facts(strategy))
    measurements = [_measure(size, strategy) for size in SIZES] if strategy.world_size > 1 else []
    backend = dist.get_backend() if dist.is_initialized() else None
    return JobFacts(backend, tuple(ranks), tuple(measurements))


def _rank_facts(strategy: Strategy) -> RankFacts:
    device = strategy.root_device
    return RankFacts(
        strategy.global_rank,
        strategy.node_rank,
        strategy.local_rank,
        socket.gethostname(),
        os.getpid(),
        str(device),
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        torch.get_num_threads(),
        versions(),
        lookup_seconds() if strategy.local_rank == 0 else 0.0,
    )


def _measure(size: int, strategy: Strategy) -> Measurement:
    times = []
    is_right = True
    expected = sum(range(1, strategy.world_size + 1))
    for _ in range(_WARM_UP + _REPEATS):
        tensor = torch.full((size // 4,), strategy.global_rank + 1.0, device=strategy.root_device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        is_right = bool((tensor == expected).all()) and is_right  # also waits for the device
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[_WARM_UP:])
    # In a ring each link carries every byte 2 (n - 1) / n times.
    carried = size * 2 * (strategy.world_size - 1) / strategy.world_size
    return Measurement(size, seconds, carried / seconds, strategy.reduce_boolean_decision(is_right))


def describe_ranks(job: JobFacts, how_started: str) -> Section:
    """Report the ranks, different versions, and devices that several ranks use."""
    rows = [
        (rank.global_rank, rank.node_rank, rank.local_rank, rank.host, rank.pid, _device(rank), rank.threads)
        for rank in job.ranks
    ]
    header = ("global_rank", "node_rank", "local_rank", "host", "pid", "device", "threads")
    count = f"{len(rows)} ranks" if len(rows) > 1 else "1 rank"
    lines = [f"{count}, {how_started}", *table(header, rows)]
    facts = [asdict(rank) for rank in job.ranks]
    return Section("ranks", "Ranks", facts, lines, [*_differences(job.ranks), *_shared_devices(job.ranks)])


def _device(rank: RankFacts) -> str:
    return "cpu" if rank.device == "cpu" else f"{rank.device} ({rank.device_name})"


def _differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    findings = []
    fix = "use the same Python environment on every node, such as one on a shared file system."
    for package in ranks[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank in ranks:
            by_version.setdefault(rank.versions[package], []).append(rank.global_rank)
        if len(by_version) > 1:
            groups = "; ".join(f"{version} on ranks {_short(who)}" for version, who in by_version.items())
            findings.append(Finding(f"The ranks have different versions of {package}: {groups}.", fix))
    return findings


def _shared_devices(ranks: Sequence[RankFacts]) -> list[Finding]:
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.device != "cpu":
            by_device.setdefault((rank.host, rank.device), []).append(rank.global_rank)
    # If each rank sees only its own device, all of them are called cuda:0.
    is_isolated = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
    fix = "start no more ranks on a node than it has devices."
    return [
        Finding(f"Ranks {_short(who)} share {device} on {host}.", fix)
        for (host, device), who in by_device.items()
        if len(who) > 1 and not is_isolated
    ]


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def describe_measurements(job: JobFacts) -> Section:
    """Report how long all-reduces take."""
    rows = [
        (_bytes(one.size), f"{one.seconds * 1000:.3f} ms", f"{_bytes(round(one.bytes_per_second))}/s")
        for one in job.measurements
    ]
    header = ("tensor", "time", "bandwidth per link")
    lines = [f"back end {job.backend}; median of {_REPEATS}", *table(header, rows)]
    fix = "test memory and network; with NCCL try NCCL_P2P_DISABLE=1."
    wrong = [one for one in job.measurements if not one.is_right]
    findings = [Finding(f"The all-reduce of {_bytes(one.size)} gave wrong sums.", fix) for one in wrong]
    facts = {"backend": job.backend, "all_reduce": [asdict(one) for one in job.measurements]}
    return Section("collectives", "All-reduce", facts, lines, findings)


def _bytes(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
