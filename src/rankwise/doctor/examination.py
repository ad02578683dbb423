"""Examine a job: bind a strategy, connect the ranks, measure, and collect the report's sections."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from rankwise.doctor.machine import (
    examine_backends,
    examine_devices,
    examine_environment,
    examine_network,
    examine_start_methods,
    examine_versions,
    lookup_seconds,
    versions,
)
from rankwise.doctor.report import Finding, Report, ReportPrinter, Section, table
from rankwise.environments import Detection, NodesEnvironment
from rankwise.errors import RankwiseError
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy, Strategy

_CHECK_RANKS = (
    "check that every rank was started, with the same main address and port, and that the nodes can reach "
    "each other (firewall, interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
)

# Bytes per tensor: from a flag to a little more than a bucket of DDP (25 MiB).
_SIZES = (4, 4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
_REPEATS = 10
_WARM_UP = 2


@final
@dataclass(frozen=True)
class JobFacts:
    """The report of rank 0 of a job: back end, ranks, and how long each all-reduce takes."""

    backend: str | None
    ranks: Sequence[Mapping[str, Any]]
    measurements: Sequence[Mapping[str, Any]]


def examine(
    environ: Mapping[str, str],
    *,
    devices: str = "auto",
    num_nodes: int | None = None,
    timeout_s: float = 60.0,
    runs_collectives: bool = True,
    tries_start_methods: bool = True,
    printer: ReportPrinter | None = None,
) -> tuple[Report, bool]:
    """Return the report, and whether this process prints it (rank 0, as far as ranks are known).

    That process gives each section to `printer` as soon as it is known.

    Collective: if an outer launcher has started ranks, every rank must call this, unless
    `runs_collectives=False`.
    """
    environment, detection = examine_environment(environ)
    report = Report([examine_versions(), environment])
    if detection is None:
        is_printed = getattr(rank_zero_only, "rank", 0) == 0
        report.print_to(printer if is_printed else None)
        _add_machine(report, environ)
        return report, is_printed
    try:
        strategy = _bind(detection, devices, num_nodes, timeout_s)
    except RankwiseError as error:
        is_printed = detection.environment.global_rank == 0
        report.print_to(printer if is_printed else None)
        report.add(_unknown_ranks(Finding(error.summary(), error.fix())))
        _add_machine(report, environ)
        return report, is_printed
    report.print_to(printer if strategy.is_global_zero else None)
    facts, problem = _run(strategy, report, timeout_s) if runs_collectives else (None, None)
    if not strategy.is_global_zero:
        report.sections += [_unknown_ranks(problem)] if problem else []
        return report, False
    report.add(*_examine_job(strategy, facts, problem, environ))
    is_external = strategy.environment.creates_processes_externally
    is_local = strategy.ranks.is_one_node and not is_external
    if runs_collectives and tries_start_methods and is_local:
        report.add(examine_start_methods(timeout_s, report.announce))
    _add_machine(report, environ)
    report.next_step = _next_step(strategy.world_size, is_local)
    return report, True


def _add_machine(report: Report, environ: Mapping[str, str]) -> None:
    """Add devices and back ends. Do this last: GPU names initialise CUDA, and no rank can fork after that."""
    report.add(examine_devices(environ))
    report.add(examine_backends(environ))


def _bind(detection: Detection, devices: str, num_nodes: int | None, timeout_s: float) -> DDPStrategy:
    """Bind a strategy to the existing ranks, or to local ones if this process is alone."""
    environment = detection.environment
    gpus = torch.cuda.device_count()  # does not initialise CUDA
    strategy = DDPStrategy(
        start_method="spawn" if gpus else "fork",
        cluster_environment=environment,
        init_timeout=timeout_s,
        timeout=timeout_s,
    )
    options: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes or "auto"}
    is_alone = not environment.creates_processes_externally
    is_one_machine = is_alone and not isinstance(environment, NodesEnvironment)
    if is_one_machine and devices == "auto" and gpus < 2:
        options |= {"devices": 2, "accelerator": "cpu"}  # NCCL does not put two ranks on one device
    strategy.bind(**options)
    return strategy


def _run(strategy: DDPStrategy, report: Report, timeout_s: float) -> tuple[JobFacts | None, Finding | None]:
    """Connect the ranks and measure; an error becomes a finding."""
    report.announce(
        f"connecting {strategy.world_size} ranks (at most {timeout_s:g} s), looking up host names, measuring "
        f"all-reduces of up to {_bytes(_SIZES[-1])}"
    )
    try:
        return strategy.launch(measure), None
    except RankwiseError as error:
        return None, Finding(error.summary(), error.fix() or _CHECK_RANKS)
    except RuntimeError as error:  # torch's, in a rank that an outer launcher has started
        return None, Finding(f"The ranks failed: {error}", _CHECK_RANKS)


def _unknown_ranks(problem: Finding) -> Section:
    return Section("ranks", "Ranks", None, ["not connected: see below"], [problem])


def _examine_job(
    strategy: DDPStrategy, facts: JobFacts | None, problem: Finding | None, environ: Mapping[str, str]
) -> list[Section]:
    environment = strategy.environment
    main_address = None if strategy.ranks.is_one_node else environment.main_address
    if facts is None:
        lookups = {"this host": lookup_seconds()}
        ranks = _unknown_ranks(problem) if problem else _this_rank(strategy.ranks)
    else:
        lookups = {rank["host"]: rank["lookup_seconds"] for rank in facts.ranks if rank["local_rank"] == 0}
        how_started = f"started for this report by {strategy.start_method}"
        if environment.creates_processes_externally:
            how_started = f"started outside of rankwise ({environment.name})"
        ranks = describe_ranks(facts, how_started)
    sections = [ranks, examine_network(environ, main_address, lookups, environment.other_node)]
    return [*sections, describe_measurements(facts)] if facts and facts.measurements else sections


def _this_rank(ranks: RankInfo) -> Section:
    place = (
        f"global_rank {ranks.global_rank} of {ranks.world_size}, local_rank {ranks.local_rank} of "
        f"{ranks.local_world_size}, node_rank {ranks.node_rank} of {ranks.num_nodes}"
    )
    return Section("ranks", "Ranks", None, [place, "no process was started or connected: --no-collectives"])


def _next_step(count: int, is_local: bool) -> str:
    if is_local:
        return (
            f'Trainer(strategy="ddp", devices={count}) in a script starts {count} processes. '
            "To examine a job on a cluster, start this command as you start the job, such as: srun python -m "
            "rankwise doctor."
        )
    return (
        "start your training as you started this command, with your script in place of -m rankwise doctor; "
        f'Trainer(strategy="ddp") in it uses these {count} ranks.'
    )


def measure(strategy: Strategy) -> JobFacts:
    """Gather every rank's facts and measure all-reduces.

    Collective: every rank must call this.
    """
    device = strategy.root_device
    rank = {
        "global_rank": strategy.global_rank,
        "node_rank": strategy.node_rank,
        "local_rank": strategy.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "lookup_seconds": lookup_seconds() if strategy.local_rank == 0 else 0.0,
    }
    ranks = strategy.all_gather_object(rank)
    measurements = [_measure(size, strategy) for size in _SIZES] if strategy.world_size > 1 else []
    return JobFacts(dist.get_backend() if dist.is_initialized() else None, ranks, measurements)


def _measure(size: int, strategy: Strategy) -> dict[str, Any]:
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
    return {
        "size": size,
        "seconds": seconds,
        "bytes_per_second": carried / seconds,
        "is_right": strategy.reduce_boolean_decision(is_right),
    }


def describe_ranks(job: JobFacts, how_started: str) -> Section:
    """Report the ranks, different versions, and devices that several ranks use."""
    header = ("global_rank", "node_rank", "local_rank", "host", "pid", "device", "threads")
    rows = [[_device(rank) if key == "device" else rank[key] for key in header] for rank in job.ranks]
    count = f"{len(rows)} ranks" if len(rows) > 1 else "1 rank"
    lines = [f"{count}, {how_started}", *table(header, rows)]
    findings = [*_differences(job.ranks), *_shared_devices(job.ranks)]
    return Section("ranks", "Ranks", list(job.ranks), lines, findings)


def _device(rank: Mapping[str, Any]) -> str:
    return "cpu" if rank["device"] == "cpu" else "{device} ({device_name})".format(**rank)


def _differences(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    findings = []
    fix = "use the same Python environment on every node, such as one on a shared file system."
    for package in ranks[0]["versions"]:
        by_version: dict[str, list[int]] = {}
        for rank in ranks:
            by_version.setdefault(rank["versions"][package], []).append(rank["global_rank"])
        if len(by_version) > 1:
            groups = "; ".join(f"{version} on ranks {_short(who)}" for version, who in by_version.items())
            findings.append(Finding(f"The ranks have different versions of {package}: {groups}.", fix))
    return findings


def _shared_devices(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank["device"] != "cpu":
            by_device.setdefault((rank["host"], rank["device"]), []).append(rank["global_rank"])
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
    rows = []
    for one in job.measurements:
        bandwidth = _bytes(round(one["bytes_per_second"]))
        rows.append((_bytes(one["size"]), f"{one['seconds'] * 1000:.3f} ms", f"{bandwidth}/s"))
    header = ("tensor", "time", "bandwidth per link")
    lines = [f"back end {job.backend}; median of {_REPEATS}", *table(header, rows)]
    fix = "test memory and network; with NCCL try NCCL_P2P_DISABLE=1."
    wrong = [_bytes(one["size"]) for one in job.measurements if not one["is_right"]]
    findings = [Finding(f"The all-reduce of {size} gave wrong sums.", fix) for size in wrong]
    facts = {"backend": job.backend, "all_reduce": list(job.measurements)}
    return Section("collectives", "All-reduce", facts, lines, findings)


def _bytes(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
