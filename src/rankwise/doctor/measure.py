"""What runs on every rank: say who and where it is, and all-reduce tensors of several sizes."""

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
"""Bytes per tensor: a flag, a small model's gradients, ..., a bucket of DDP (25 MiB) and a little more."""
_REPEATS = 10
_WARM_UP = 2


@final
@dataclass(frozen=True)
class RankFacts:
    """One rank, as it sees itself."""

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
    """All-reduces of one size: the median time, what a link carried per second, were the sums right."""

    size: int
    seconds: float
    bytes_per_second: float
    is_right: bool


@final
@dataclass(frozen=True)
class Meeting:
    """What rank 0 knows once all ranks have met."""

    backend: str | None
    ranks: tuple[RankFacts, ...]
    measurements: tuple[Measurement, ...]


def meet(strategy: Strategy) -> Meeting:
    """Gather every rank's facts, and measure.

    Collective: every rank must call this.
    """
    ranks = strategy.all_gather_object(_own_facts(strategy))
    measurements = [_measure(size, strategy) for size in SIZES] if strategy.world_size > 1 else []
    backend = dist.get_backend() if dist.is_initialized() else None
    return Meeting(backend, tuple(ranks), tuple(measurements))


def _own_facts(strategy: Strategy) -> RankFacts:
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
        is_right = bool((tensor == expected).all()) and is_right  # waits for the device too
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[_WARM_UP:])
    # A ring sends each byte 2 (n - 1) / n times over each link, whatever the number of ranks.
    carried = size * 2 * (strategy.world_size - 1) / strategy.world_size
    everywhere = strategy.reduce_boolean_decision(is_right)
    return Measurement(size, seconds, carried / seconds, everywhere)


# ---------------------------------------------------------------------------------------- in words


def describe_ranks(endpoint: Meeting, how: str) -> Section:
    """Say which ranks have met, and what differs between them that should not."""
    rows = [
        (rank.global_rank, rank.node_rank, rank.local_rank, rank.host, rank.pid, _device(rank), rank.threads)
        for rank in endpoint.ranks
    ]
    header = ("global_rank", "node_rank", "local_rank", "host", "pid", "device", "threads")
    lines = [f"{len(rows)} ranks, {how}" if len(rows) > 1 else f"1 rank, {how}", *table(header, rows)]
    facts = [asdict(rank) for rank in endpoint.ranks]
    return Section("ranks", "Ranks", facts, lines, [*_differences(endpoint.ranks), *_shared(endpoint.ranks)])


def _device(rank: RankFacts) -> str:
    return "cpu" if rank.device == "cpu" else f"{rank.device} ({rank.device_name})"


def _differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    findings = []
    for package in ranks[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank in ranks:
            by_version.setdefault(rank.versions[package], []).append(rank.global_rank)
        if len(by_version) > 1:
            groups = "; ".join(f"{version} on ranks {_short(who)}" for version, who in by_version.items())
            findings.append(
                Finding(
                    f"The ranks have different versions of {package}: {groups}.",
                    "use the same Python environment on every node, such as one on a shared file system.",
                )
            )
    return findings


def _shared(ranks: Sequence[RankFacts]) -> list[Finding]:
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.device != "cpu":
            by_device.setdefault((rank.host, rank.device), []).append(rank.global_rank)
    # With one visible device each, every rank's own device is called cuda:0.
    is_isolated = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
    return [
        Finding(
            f"Ranks {_short(who)} share {device} on {host}.",
            "start as many ranks on a node as it has devices.",
        )
        for (host, device), who in by_device.items()
        if len(who) > 1 and not is_isolated
    ]


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def describe_measurements(endpoint: Meeting) -> Section:
    """Say how long all-reduces take."""
    rows = [
        (_bytes(one.size), f"{one.seconds * 1000:.3f} ms", f"{_bytes(round(one.bytes_per_second))}/s")
        for one in endpoint.measurements
    ]
    lines = [
        f"back end {endpoint.backend}; median of {_REPEATS}",
        *table(("tensor", "time", "bandwidth per link"), rows),
    ]
    wrong = [_bytes(one.size) for one in endpoint.measurements if not one.is_right]
    findings = [
        Finding(
            f"The all-reduce of {size} gave wrong sums.",
            "test memory and network; with NCCL try NCCL_P2P_DISABLE=1.",
        )
        for size in wrong
    ]
    facts = {"backend": endpoint.backend, "all_reduce": [asdict(one) for one in endpoint.measurements]}
    return Section("collectives", "All-reduce", facts, lines, findings)


def _bytes(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
