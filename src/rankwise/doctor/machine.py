"""The report's sections on this machine: launcher, versions, devices, network, start methods."""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankwise
from rankwise.doctor.report import Finding, Section, table
from rankwise.environments import Detection, detect_environment
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
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.strategies.job import usable_cores
from rankwise.time_limit import call_with_limit

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  only its size is read
_SMALL_SHARED_MEMORY = 256 * 2**20
# By the variable of a scheduler's allocation: the scheduler, and the command that starts ranks in it.
_SCHEDULERS = {"SLURM_JOB_ID": ("Slurm", "srun"), "LSB_JOBID": ("LSF", "jsrun")}
_PRESETS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_NOTHING_IF_INTENDED = "nothing, if this is intended."
_LONGEST_LOOKUP_S = 6.0  # a resolver's own limit is 5 s
_SLOW_LOOKUP_S = 1.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def versions() -> dict[str, str]:
    """Return the versions that all ranks of a job should share."""
    return {
        "rankwise": rankwise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }


def examine_versions() -> Section:
    """Report the installed versions, and the packages that add names to rankwise's tables."""
    facts: dict[str, Any] = {**versions(), "platform": platform.platform(), "entry_points": _entry_points()}
    line = "rankwise {rankwise}, torch {torch}, Python {python}, CUDA {cuda}".format(**facts)
    added = [f"{package} adds {', '.join(names)}" for package, names in facts["entry_points"].items()]
    return Section("versions", "Versions", facts, [line, facts["platform"], *added])


def _entry_points() -> dict[str, list[str]]:
    """Return the entry points of each installed package, such as "strategies: ddp_fast"; loads none."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        for point in installed(kind):
            found.setdefault(package_of(point), []).append(f"{kind}: {point.name}")
    return found


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
    facts = {
        "name": environment.name,
        "reason": detection.reason,
        "variables": variables,
        "rejected": rejected,
    }
    findings = [Finding(str(each.message), _NOTHING_IF_INTENDED, is_error=False) for each in caught]
    if not environment.creates_processes_externally:
        findings += _notes_when_alone(environ)
    return Section(key, title, facts, lines, findings), detection


def _notes_when_alone(environ: Mapping[str, str]) -> list[Finding]:
    notes = []
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
            notes.append(Finding(what, fix, is_error=False))
    if presets := [f"{name}={environ[name]}" for name in _PRESETS if environ.get(name)]:
        what = f"{', '.join(presets)} is set without the other variables of a launcher, so it was ignored."
        fix = (
            "nothing, if this machine or image presets it; if you start the ranks by hand, set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each."
        )
        notes.append(Finding(what, fix, is_error=False))
    return notes


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
    return Section("devices", "Devices", facts, lines, _device_findings(facts))


def _device_findings(facts: Mapping[str, Any]) -> list[Finding]:
    findings = []
    if not facts["cuda"] and Path("/dev/nvidia0").exists():
        what = f"This machine has an NVIDIA GPU, but torch {torch.__version__} finds none."
        fix = "unset CUDA_VISIBLE_DEVICES, which is empty."
        if facts["cuda_visible_devices"] != "":
            fix = (
                "install a torch with CUDA that fits the driver (nvidia-smi shows its version): "
                "https://pytorch.org/get-started"
            )
        findings.append(Finding(what, fix))
    shared = facts["shared_memory_bytes"]
    if shared is not None and shared < _SMALL_SHARED_MEMORY:
        size = f"{shared / 2**20:.0f} MiB"
        what = f"{_SHARED_MEMORY} holds only {size}, and DataLoader workers send batches through it."
        fix = "start the container with --shm-size=2g (Kubernetes: mount an emptyDir of medium Memory there)."
        findings.append(Finding(what, fix, is_error=False))
    return findings


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
    facts = {"available": has, "default": used}
    return Section("back_ends", "Back ends", facts, lines, _backend_findings(has, environ))


def _backend_findings(has: Mapping[str, bool], environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    if torch.cuda.device_count() and not has["nccl"]:
        what = "There are CUDA devices, but this torch has no NCCL: gradients would go through the CPU."
        fix = "install a torch with NCCL, such as the Linux wheels of https://pytorch.org/get-started."
        findings.append(Finding(what, fix))
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on gloo."
        findings.append(Finding(what, "unset it, or use TORCH_DISTRIBUTED_DEBUG=INFO."))
    return findings


def lookup_seconds() -> float:
    """Return the seconds of the slower of two look-ups: this host's address, and its name."""
    slowest = 0.0
    for look_up in (socket.gethostbyname, socket.gethostbyaddr):
        started = time.monotonic()
        # An unknown name ends the look-up too.
        call_with_limit(partial(look_up, socket.gethostname()), _LONGEST_LOOKUP_S, OSError)
        slowest = max(slowest, time.monotonic() - started)
    return slowest


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
    if main_address is not None:
        with contextlib.suppress(ConfigurationError):
            facts["interface"] = interface_toward(main_address)
    lines = [f"host name: {facts['host']}"]
    lines += [f"interface {name}: {address}" for name, address in there.items()]
    lines.append(_describe_main_address(main_address, facts["interface"]))
    lines += [
        f"names are looked up in {seconds * 1000:.0f} ms on {host}"
        for host, seconds in slowest_lookups.items()
    ]
    findings = [*_lookup_findings(slowest_lookups), *_interface_findings(environ, there)]
    findings += _address_findings(main_address, other_node)
    return Section("network", "Addresses", facts, lines, findings)


def _describe_main_address(main_address: str | None, interface: str | None) -> str:
    if main_address is None:
        return "the ranks of one node listen on loopback only: no other host can reach them"
    if interface is None:
        return f"rank 0 is at {main_address}"
    return f"rank 0 is at {main_address}, reached through interface {interface}"


def _lookup_findings(slowest: Mapping[str, float]) -> list[Finding]:
    slow = [host for host, seconds in slowest.items() if seconds > _SLOW_LOOKUP_S]
    if not slow:
        return []
    what = (
        f"Looking up host names took {max(slowest.values()):.1f} s on {', '.join(slow)}. torch looks up "
        "names for every connection to its TCP store, so the rendezvous may time out."
    )
    fix = "add the host and its address to /etc/hosts, or correct /etc/resolv.conf."
    return [Finding(what, fix, is_error=False)]


def _interface_findings(environ: Mapping[str, str], known: Mapping[str, str]) -> list[Finding]:
    findings = []
    for variable in _INTERFACE_VARIABLES:
        # NCCL's may be a list, prefixes or an exclusion: check plain names only
        wanted = environ.get(variable, "")
        is_known = any(name.startswith(wanted.lstrip("=")) for name in known)
        if wanted and known and not is_known and wanted.replace("=", "").isalnum():
            what = f"{variable}={wanted} names an interface that this machine does not have."
            findings.append(Finding(what, f"use one of {', '.join(known)}, or unset it."))
    return findings


def _address_findings(main_address: str | None, other_node: str | None) -> list[Finding]:
    if main_address is None:
        return []
    try:
        address_toward(main_address)
    except ConfigurationError as error:
        return [Finding(error.summary(), error.fix())]
    if is_own_loopback_name(main_address):
        return [_own_name_finding(main_address, other_node)]
    # Unlike the host's own name, these are loopback on every node.
    if main_address not in ("localhost", "::1") and not main_address.startswith("127."):
        return []
    what = f"The main address {main_address!r} is loopback, but the job has several nodes."
    fix = (
        "set MASTER_ADDR to an address of rank 0's node that the other nodes can reach. (Nothing, if all "
        "nodes are on this machine.)"
    )
    return [Finding(what, fix, is_error=False)]


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
    findings = []
    for method, result in results.items():
        if not result["works"]:
            what = f'strategy="{_NAMES[method]}" does not work here: {result["problem"]}'
            findings.append(Finding(what, result["fix"] or alternative))
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
