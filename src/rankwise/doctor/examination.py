"""The examinations that a report consists of: launcher, ranks, measurements, network, machine."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

import rankwise
from rankwise.doctor.report import Finding, Report, Section, table
from rankwise.environments import Detection, NodesEnvironment, detect_environment
from rankwise.environments.network import (
    address_toward,
    interface_toward,
    interfaces_by_address,
    is_own_loopback_name,
    listening_address,
)
from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.named_options import KINDS, installed, package_of
from rankwise.process_group import default_backend
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.strategies.job import usable_cores
from rankwise.time_limit import call_with_limit

_CHECK_RANKS = (
    "check that every rank was started, with the same main address and port, and that the nodes can reach "
    "each other (firewall, interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
)

# Bytes per tensor: from a flag to a little more than a bucket of DDP (25 MiB).
_SIZES = (4, 4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
_REPEATS = 10
_WARM_UP = 2

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  only its size is read
_SMALL_SHARED_MEMORY = 256 * 2**20
# By the variable of a scheduler's allocation: the scheduler, and the command that starts ranks in it.
_SCHEDULERS = {"SLURM_JOB_ID": ("Slurm", "srun"), "LSB_JOBID": ("LSF", "jsrun")}
_PRESETS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_LONGEST_LOOKUP_S = 6.0  # a resolver's own limit is 5 s
_SLOW_LOOKUP_S = 1.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@final
class JobFacts(NamedTuple):
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
    as_json: bool | None = None,
) -> tuple[Report, bool]:
    """Return the report, and whether this process prints it: rank 0, as far as ranks are known.

    It prints each section as soon as it is known, or with `as_json` nothing but progress; with None neither.

    Collective: of ranks that a launcher has started, all must call this, unless `runs_collectives=False`.
    """
    environment, detection = examine_environment(environ)
    report = Report([examine_versions(), environment])
    strategy, rank, unknown = None, getattr(rank_zero_only, "rank", 0), list[Section]()
    if detection is not None:
        try:
            strategy = _bind(detection, devices, num_nodes, timeout_s)
            rank = strategy.global_rank  # an environment need not know it
        except RankwiseError as error:
            rank = detection.environment.global_rank
            unknown = [_unknown_ranks(Finding(error.summary(), error.fix()))]
    if rank == 0 and as_json is not None:
        report.start_printing(as_json=as_json)
    report.add(*unknown)
    if strategy is not None:
        facts, problem = _run(strategy, report, timeout_s) if runs_collectives else (None, None)
        if rank != 0:
            report.sections += [_unknown_ranks(problem)] if problem else []
            return report, False
        report.add(*_examine_job(strategy, facts, problem, environ))
        is_local = strategy.ranks.is_one_node and not strategy.environment.creates_processes_externally
        if runs_collectives and tries_start_methods and is_local:
            report.add(examine_start_methods(timeout_s, report.announce))
        report.next_step = _next_step(strategy.world_size, is_local)
    # At the end, as the names of GPUs initialise CUDA, and no rank can be forked after that.
    report.add(examine_devices(environ))
    report.add(examine_backends(environ))
    return report, rank == 0


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
    """Gather every rank's facts and measure all-reduces. Collective: every rank must call this."""
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


def _differences(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    fix = "use the same Python environment on every node, such as one on a shared file system."
    for package in ranks[0]["versions"]:
        by_version: dict[str, list[int]] = {}
        for rank in ranks:
            by_version.setdefault(rank["versions"][package], []).append(rank["global_rank"])
        if len(by_version) > 1:
            groups = "; ".join(f"{version} on ranks {_short(who)}" for version, who in by_version.items())
            yield Finding(f"The ranks have different versions of {package}: {groups}.", fix)


def _shared_devices(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank["device"] != "cpu":
            by_device.setdefault((rank["host"], rank["device"]), []).append(rank["global_rank"])
    # If each rank sees only its own device, all of them are called cuda:0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_error = "," in visible
    is_isolated = visible != "" and not is_error
    if_not = "" if is_error else ", unless each is in a container with its own device"
    for (host, device), who in by_device.items():
        if len(who) > 1 and not is_isolated:
            fix = "start no more ranks on a node than it has devices."
            yield Finding(f"Ranks {_short(who)} share {device} on {host}{if_not}.", fix, is_error=is_error)


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


def versions() -> dict[str, str]:
    """Return the versions that all ranks of a job should share."""
    return {
        "rankwise": rankwise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }


def examine_versions() -> Section:
    """Report the installed versions, and the names that packages add to rankwise's tables."""
    names_of: dict[str, list[str]] = {}
    for kind in KINDS:
        for point in installed(kind):
            names_of.setdefault(package_of(point), []).append(f"{kind}: {point.name}")
    facts = {**versions(), "platform": platform.platform()}
    line = "rankwise {rankwise}, torch {torch}, Python {python}, CUDA {cuda}".format(**facts)
    added = [f"{package} adds {', '.join(names)}" for package, names in names_of.items()]
    lines = [line, facts["platform"], *added]
    return Section("versions", "Versions", {**facts, "entry_points": names_of}, lines)


def examine_environment(environ: Mapping[str, str]) -> tuple[Section, Detection | None]:
    """Report what was detected and why the others were not; the `Detection` is None if that failed."""
    key, title = "environment", "Who started this process"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            detection = detect_environment(environ)
    except RankwiseError as error:
        facts: dict[str, Any] = {"name": None, "reason": error.summary(), "variables": {}, "rejected": {}}
        lines = ["not known: a launcher's variables are set, but wrong"]
        lines += [f"  {seen}"] if (seen := error.seen()) else []
        return Section(key, title, facts, lines, [Finding(error.summary(), error.fix())]), None
    environment = detection.environment
    variables, rejected = environment.seen(), dict(detection.rejected)
    lines = [f"{environment.name}: {detection.reason}"]
    lines += [f"  {name}={value}" for name, value in variables.items()]
    lines += [f"not {name}: {reason}" for name, reason in rejected.items()]
    facts = {"name": environment.name, "reason": detection.reason}
    facts |= {"variables": variables, "rejected": rejected}
    fix = "nothing, if this is intended."
    findings = [Finding(str(each.message), fix, is_error=False) for each in caught]
    if not environment.creates_processes_externally:
        findings += _notes_when_alone(environ)
    return Section(key, title, facts, lines, findings), detection


def _notes_when_alone(environ: Mapping[str, str]) -> Iterator[Finding]:
    for variable, (scheduler, starter) in _SCHEDULERS.items():
        if job := environ.get(variable):
            what = (
                f"This is {scheduler} job {job}, but {starter} did not start this process: it is alone and "
                "uses this node only."
            )
            fix = (
                f"to train on all tasks of the job, put {starter} before the command: {starter} python "
                "train.py. To train on this node only, nothing."
            )
            yield Finding(what, fix, is_error=False)
    if presets := [f"{name}={environ[name]}" for name in _PRESETS if environ.get(name)]:
        what = f"{', '.join(presets)} is set without the other variables of a launcher, so it was ignored."
        fix = (
            "nothing, if this machine or image presets it; if you start the ranks by hand, set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each."
        )
        yield Finding(what, fix, is_error=False)


def examine_devices(environ: Mapping[str, str]) -> Section:
    """Report the devices."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "cuda": gpus,
        "cuda_visible_devices": environ.get("CUDA_VISIBLE_DEVICES"),
        "cpu_cores": usable_cores(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "shared_memory_bytes": shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.exists() else None,
    }
    lines = [f"cuda:{index}: {name}" for index, name in enumerate(gpus)] or ["no CUDA device"]
    lines.append(f"{facts['cpu_cores']} CPU cores for this process")
    return Section("devices", "Devices", facts, lines, [*_device_findings(facts)])


def _device_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if not facts["cuda"] and Path("/dev/nvidia0").exists():
        what = f"This machine has an NVIDIA GPU, but torch {torch.__version__} finds none."
        fix = "unset CUDA_VISIBLE_DEVICES, which is empty."
        if facts["cuda_visible_devices"] != "":
            fix = (
                "install a torch with CUDA that fits the driver (nvidia-smi shows its version): "
                "https://pytorch.org/get-started"
            )
        yield Finding(what, fix)
    shared = facts["shared_memory_bytes"]
    if shared is not None and shared < _SMALL_SHARED_MEMORY:
        size = f"{shared / 2**20:.0f} MiB"
        what = f"{_SHARED_MEMORY} holds only {size}, and DataLoader workers send batches through it."
        fix = "start the container with --shm-size=2g (Kubernetes: mount an emptyDir of medium Memory there)."
        yield Finding(what, fix, is_error=False)


def examine_backends(environ: Mapping[str, str]) -> Section:
    """Report the back ends of this torch."""
    has = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    kinds = ("cpu", "cuda") if torch.cuda.device_count() else ("cpu",)
    used = {kind: default_backend(kind) for kind in kinds}
    lines = [f"{name}: {'available' if is_there else 'not in this torch'}" for name, is_there in has.items()]
    lines.append("used by default: " + ", ".join(f"{name} on {kind}" for kind, name in used.items()))
    findings = []
    if torch.cuda.device_count() and not has["nccl"]:
        what = "There are CUDA devices, but this torch has no NCCL: gradients would go through the CPU."
        fix = "install a torch with NCCL, such as the Linux wheels of https://pytorch.org/get-started."
        findings.append(Finding(what, fix))
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on gloo."
        findings.append(Finding(what, "unset it, or use TORCH_DISTRIBUTED_DEBUG=INFO."))
    return Section("back_ends", "Back ends", {"available": has, "default": used}, lines, findings)


def lookup_seconds() -> float:
    """Return the seconds of the slower of two look-ups: this host's address, and its name."""
    took = []
    for look_up in (socket.gethostbyname, socket.gethostbyaddr):
        started = time.monotonic()
        # An unknown name ends the look-up too.
        call_with_limit(partial(look_up, socket.gethostname()), _LONGEST_LOOKUP_S, OSError)
        took.append(time.monotonic() - started)
    return max(took)


def examine_network(
    environ: Mapping[str, str],
    main_address: str | None,
    slowest_lookups: Mapping[str, float],
    other_node: str | None = None,
) -> Section:
    """Report how the ranks connect; `main_address` is None on one node, `slowest_lookups` in seconds."""
    there = {name: address for address, name in reversed(interfaces_by_address().items())}
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "interfaces": there,
        "main_address": main_address,
        "interface": None,
        "lookup_seconds": {host: round(seconds, 3) for host, seconds in slowest_lookups.items()},
    }
    findings = [*_network_findings(environ, there, slowest_lookups)]
    place = "the ranks of one node listen on loopback only: no other host can reach them"
    if main_address is not None:
        with contextlib.suppress(ConfigurationError):
            facts["interface"] = interface_toward(main_address)
        reached = f", reached through interface {facts['interface']}" if facts["interface"] else ""
        place = f"rank 0 is at {main_address}{reached}"
        findings += _address_findings(main_address, other_node)
    lines = [f"host name: {facts['host']}"]
    lines += [f"interface {name}: {address}" for name, address in there.items()]
    lines.append(place)
    for host, seconds in slowest_lookups.items():
        lines.append(f"names are looked up in {seconds * 1000:.0f} ms on {host}")
    return Section("network", "Addresses", facts, lines, findings)


def _network_findings(
    environ: Mapping[str, str], known: Mapping[str, str], slowest: Mapping[str, float]
) -> Iterator[Finding]:
    if slow := [host for host, seconds in slowest.items() if seconds > _SLOW_LOOKUP_S]:
        what = (
            f"Looking up host names took {max(slowest.values()):.1f} s on {', '.join(slow)}. torch looks up "
            "names for every connection to its TCP store, so the rendezvous may time out."
        )
        fix = "add the host and its address to /etc/hosts, or correct /etc/resolv.conf."
        yield Finding(what, fix, is_error=False)
    for variable in _INTERFACE_VARIABLES:
        # NCCL's may be a list, prefixes or an exclusion: check plain names only
        wanted = environ.get(variable, "")
        is_known = any(name.startswith(wanted.lstrip("=")) for name in known)
        if wanted and known and not is_known and wanted.replace("=", "").isalnum():
            what = f"{variable}={wanted} names an interface that this machine does not have."
            yield Finding(what, f"use one of {', '.join(known)}, or unset it.")


def _address_findings(main_address: str, other_node: str | None) -> Iterator[Finding]:
    try:
        address_toward(main_address)
    except ConfigurationError as error:
        yield Finding(error.summary(), error.fix())
        return
    if is_own_loopback_name(main_address):
        yield _own_name_finding(main_address, other_node)
    # Unlike the host's own name, these are loopback on every node.
    elif main_address in ("localhost", "::1") or main_address.startswith("127."):
        what = f"The main address {main_address!r} is loopback, but the job has several nodes."
        fix = (
            "set MASTER_ADDR to an address of rank 0's node that the other nodes can reach. (Nothing, if all "
            "nodes are on this machine.)"
        )
        yield Finding(what, fix, is_error=False)


def _own_name_finding(main_address: str, other_node: str | None) -> Finding:
    try:
        address = listening_address(main_address, other_node)
    except ConfigurationError as error:
        return Finding(f"{error.summary()} {error.seen()}", error.fix(), is_error=False)
    what = (
        f"This host resolves its own name {main_address!r} to loopback (as Debian's /etc/hosts does). "
        f"The rendezvous is at {address}: the other nodes must resolve the name to that address."
    )
    fix = f"nothing, if they do; otherwise set MASTER_ADDR={address} (or the right one) on every node."
    return Finding(what, fix, is_error=False)


_SCRIPT = f"from {__name__} import try_start_method; try_start_method('popen', {{timeout_s!r}})"
_NAMES = {"popen": "ddp", "spawn": "ddp_spawn", "fork": "ddp_fork", "forkserver": "ddp_forkserver"}


def examine_start_methods(timeout_s: float, announce: Callable[[str], None]) -> Section:
    """Try each start method; `announce` is told which one."""
    results = {}
    for method in _NAMES:
        announce(f"starting two processes by {method!r} (at most {timeout_s:g} s)")
        results[method] = _result_of(method, timeout_s)
    rows = [
        (_NAMES[method], method, f"{result['seconds']:.1f} s" if result["works"] else "failed: see below")
        for method, result in results.items()
    ]
    lines = table(("strategy", "start_method", "two processes"), rows)
    alternative = "no start method works: check whether processes may be started here (ulimit -u, seccomp)."
    if working := [_NAMES[method] for method, result in results.items() if result["works"]]:
        alternative = f'use strategy="{working[0]}" instead.'
    findings = [
        Finding(
            f'strategy="{_NAMES[method]}" does not work here: {result["problem"]}',
            result["fix"] or alternative,
        )
        for method, result in results.items()
        if not result["works"]
    ]
    return Section("start_methods", "Start methods", results, lines, findings)


def try_start_method(start_method: str, timeout_s: float) -> None:
    """Start two processes and connect them once."""
    strategy = DDPStrategy(
        accelerator="cpu",
        devices=2,
        num_nodes=1,
        cluster_environment="local",
        start_method=start_method,
        init_timeout=timeout_s,
        timeout=timeout_s,
    )
    strategy.launch(Strategy.barrier)


def _try_script(timeout_s: float) -> None:
    # In another program, since the workers of "popen" run until the program ends.
    command = [sys.executable, "-c", _SCRIPT.format(timeout_s=timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s + 60)
    if done.returncode != 0:
        lines = done.stderr.split("\n")
        raise RuntimeError(next(filter(str.strip, reversed(lines)), f"exit code {done.returncode}"))


def _result_of(start_method: str, timeout_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {"works": True, "seconds": None, "problem": "", "fix": ""}
    started = time.monotonic()
    try:
        _try_script(timeout_s) if start_method == "popen" else try_start_method(start_method, timeout_s)
    except RankwiseError as error:
        result.update(works=False, problem=error.summary(), fix=error.fix())
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        result.update(works=False, problem=f"{error}.")
    result["seconds"] = round(time.monotonic() - started, 3)
    return result
