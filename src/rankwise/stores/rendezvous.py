"""Let all ranks exchange their identities in the store, and number the restarts of an elastic job."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from rankwise.environments import ClusterEnvironment, SlurmEnvironment, TorchElasticEnvironment
from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo
from rankwise.stores.private import is_private
from rankwise.stores.sealed import NamedPrefixStore, job_key_of_environment, part_of, seal
from rankwise.stores.values import read_value
from rankwise.stores.waiting import poll_until, wait_for_keys

FAILURE = "failure"  # the key of the first failure's record
_ANSWER_TIMEOUT = timedelta(seconds=1)
_MOST_NAMED = 10
_ERROR_FILE, _RUN_ID = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"
_COUNT = "TORCHELASTIC_RESTART_COUNT"
_UNNAMED = "none"  # torchrun's default run id


@final
class RemoteFailure(Exception):
    """A rank of another node has failed, before this one needed it or after this one was done."""

    def __init__(self, record: bytes) -> None:
        super().__init__("a rank of another node has failed")
        self.record = record


def read_key(rank: int) -> str:
    """Return the key that a rank sets when it has read the failure's record."""
    return f"read/{rank}"


@final
@dataclass(frozen=True)
class RankIdentity:
    """One rank, and its device if no other rank may use the same one (an empty text otherwise)."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device: str = ""

    def __str__(self) -> str:
        return f"global_rank {self.global_rank} (node {self.node_rank}, host {self.host!r}, pid {self.pid})"


def identity_of(ranks: RankInfo, device: str = "") -> RankIdentity:
    """Return this process's identity."""
    place = (ranks.global_rank, ranks.local_rank, ranks.node_rank, ranks.world_size)
    return RankIdentity(*place, socket.gethostname(), os.getpid(), device)


def mig_slices(environ: Mapping[str, str]) -> list[str]:
    """Return the uuids by which the environment names slices of a GPU (MIG); [] where it names none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible.startswith("MIG-") else []


def exclusive_device(backend: str, device: torch.device) -> str:
    """Return the identity of a device that one rank alone may use, as NCCL's; an empty text for others."""
    if device.type != "cuda" or "nccl" not in backend:
        return ""
    if slices := mig_slices(os.environ):
        return slices[device.index or 0]  # torch knows the uuid of the whole GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def run_rendezvous(store: dist.Store, own: RankIdentity, timeout: timedelta) -> tuple[RankIdentity, ...]:
    """Wait until every rank is here; return all identities by global rank.

    Collective: every rank must call this. The last rank to arrive compares the identities; each rank raises
    where they do not form one job, and `RemoteFailure` when a rank's failure is published meanwhile.
    """
    arrival = store.add("arrived", 1)
    if arrival > own.world_size:
        raise _duplicate_rank_error(own)
    write_identity(store, arrival, own)
    if arrival == own.world_size:
        numbers = range(1, arrival + 1)
        are_written = wait_for_keys(store, [_identity_key(number) for number in numbers], timeout)
        here = read_identities(store, numbers)
        if not are_written:
            raise _missing_ranks_error(own, here, timeout)
        store.set("met", json.dumps([disagreement(here), [asdict(each) for each in here]]))
    else:
        _wait_for_the_last(store, own, timeout)
    problem, identities = read_value(store, "met", tuple[str, list[RankIdentity]])
    identities.sort(key=attrgetter("global_rank"))
    if not problem and [each.global_rank for each in identities] != list(range(own.world_size)):
        problem = f"The ranks that the job's store names are not the {own.world_size} ranks of this job."
    if problem:
        raise ProcessGroupError(problem, "start every rank once, each with its own rank and device.")
    return tuple(identities)


def disagreement(identities: Sequence[RankIdentity]) -> str:
    """Return why these ranks do not form one job, or an empty text."""
    sizes = [each.world_size for each in identities]
    if len(set(sizes)) > 1:
        most = max(sizes, key=sizes.count)
        odd = next(each for each in identities if each.world_size != most)
        return f"{odd} has a world size of {odd.world_size}, others have one of {most}."
    with_device = [each for each in identities if each.device]
    return (
        _duplicate(identities, "global_rank")
        or _duplicate(identities, "local_rank", "host", "node_rank")
        or _duplicate(with_device, "device", "host")
    )


def _duplicate(identities: Sequence[RankIdentity], what: str, *scope: str) -> str:
    """Return which two ranks have the same value of `what` within a scope, or an empty text."""
    key, first = attrgetter(what, *scope), dict[object, RankIdentity]()
    for each in identities:
        if (other := first.setdefault(key(each), each)) is not each:
            return f"{other} and {each} have the same {what}."
    return ""


def write_identity(store: dist.Store, number: int, identity: RankIdentity) -> None:
    """Write the identity of the rank that arrived as number so many."""
    store.set(_identity_key(number), json.dumps(asdict(identity)))


def read_identities(store: dist.Store, numbers: Iterable[int]) -> list[RankIdentity]:
    """Return the identities that are written under these numbers."""
    keys = [_identity_key(number) for number in numbers]
    return [read_value(store, key, RankIdentity) for key in keys if store.check([key])]


def _identity_key(number: int) -> str:
    return f"identity/{number}"


def _wait_for_the_last(store: dist.Store, own: RankIdentity, timeout: timedelta) -> None:
    if is_private(store):
        if wait_for_keys(store, ["met"], timeout):
            return
    elif poll_until(lambda: _is_complete(store, own), timeout):
        return
    if not _is_set_soon(store, "arrived"):
        waiting_for = "an answer of the process that hosts the store: it hangs, or is suspended"
        raise RendezvousTimeoutError(waiting_for, timeout.total_seconds())
    arrived = store.add("arrived", 0)
    if arrived > own.world_size:
        raise _duplicate_rank_error(own)
    if arrived == own.world_size and _is_set_soon(store, "met"):
        return  # the last rank arrived just in time
    raise _missing_ranks_error(own, read_identities(store, range(1, arrived + 1)), timeout)


def _is_complete(store: dist.Store, own: RankIdentity) -> bool:
    if store.check(["met"]):
        return True
    if store.check([FAILURE]):
        store.set(read_key(own.global_rank), "1")
        raise RemoteFailure(bytes(store.get(FAILURE)))
    return False


def _is_set_soon(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], _ANSWER_TIMEOUT)
    except dist.DistStoreError:
        return False
    return True


def _duplicate_rank_error(own: RankIdentity) -> ProcessGroupError:
    return ProcessGroupError(
        f"{own} came to a rendezvous of {own.world_size} ranks that are all there: a rank was started twice, "
        "or another job uses the same address and port.",
        "start every rank once; give each job a MASTER_PORT of its own.",
    )


def _missing_ranks_error(
    own: RankIdentity, here: Sequence[RankIdentity], timeout: timedelta
) -> RendezvousTimeoutError:
    missing = sorted(set(range(own.world_size)) - {each.global_rank for each in here})
    more = ", ..." if len(missing) > _MOST_NAMED else ""
    names = ", ".join(map(str, missing[:_MOST_NAMED]))
    came = ", ".join(map(str, here[:_MOST_NAMED]))
    waiting_for = f"global_rank {names}{more} to come to the process group (here are {came})"
    return RendezvousTimeoutError(waiting_for, timeout.total_seconds())


# ------------------------------------------------------------------ restarts of an elastic job


@final
@dataclass(frozen=True)
class RestartInfo:
    """Which restart of a job this is."""

    number: int = 0  # 0 for the first start
    job: str = ""  # the same in all restarts; empty: unknown, or several processes of a worker train
    is_requeued: bool = False  # by a scheduler: a `ckpt_path` of `fit` counts then


_noted: RestartInfo | None = None
# By the address of the agents' store, and the process id where one rank may have several processes.
_agreed: dict[tuple[tuple[str, int], int], RestartInfo] = {}


def note_restart(restart: RestartInfo) -> None:
    """Set what `current_restart` returns."""
    global _noted
    _noted = restart


def current_restart(environment: ClusterEnvironment | None = None) -> RestartInfo:
    """Return this process's restart: what the ranks have agreed on, Slurm's, or the agent's own count."""
    if _noted is not None:
        return _noted
    if isinstance(environment, SlurmEnvironment) and environment.auto_requeue:
        return RestartInfo(environment.restart_count, environment.step_name, is_requeued=True)
    run_id = os.environ.get(_RUN_ID, "")
    count = TorchElasticEnvironment().restart_count if _COUNT in os.environ else 0
    return RestartInfo(count, "" if run_id == _UNNAMED else run_id)


def find_restart(
    address: tuple[str, int], store: dist.Store, ranks: RankInfo, timeout: timedelta
) -> RestartInfo:
    """Return this process's restart, and cache it; the ranks agree on it once, in the agents' store.

    Collective: every rank must call this.
    """
    key = (address, os.getpid() if ranks.world_size == 1 else 0)
    if key not in _agreed:
        _agreed[key] = agree_on_restart(store, ranks, timeout)
    note_restart(_agreed[key])
    return _agreed[key]


def agree_on_restart(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> RestartInfo:
    """Return the restart that all present ranks belong to; it has its own keys in `store`, which outlives it.

    Collective: every rank must call this, once.

    Nothing in the environment of torchrun's workers says which restart this is: `TORCHELASTIC_RESTART_COUNT`
    is each agent's own, and an agent that joins after a failure counts from 0. So rank 0 takes the next
    number and writes it; the others come under it, and wait until rank 0 has counted them. A rank that is
    faster than its rank 0 comes under the number of an earlier restart, is not counted, and waits for the
    next one. torch's agents start no rank before all ranks of the restart before have ended.

    A job of one rank may have several processes, one after another or at once: a sweep whose trials inherit
    the rank's variables. They belong to one restart, so the first of them takes its number. They share the
    path of the worker's error file, whose folder the agent creates at each restart. Nothing identifies the
    same trial after a restart, so only a process that is alone of its kind resumes a job.
    """
    store, own, part = NamedPrefixStore("rankwise", store), identity_of(ranks), ""
    store = seal(store, job_key_of_environment())
    if ranks.world_size > 1:
        number = (_lead if ranks.is_global_zero else _follow)(store, own, timeout)
    else:
        of_worker = part_of(store, _worker_name())
        if not of_worker.check(["number"]):  # the first of the worker's processes takes it
            of_worker.compare_set("number", "", str(_lead(store, own, timeout)))
        number = read_value(of_worker, "number", int)
        part = "/child" if _is_child() else ""
        if of_worker.add(f"processes{part}", 1) > 1:
            store.set(f"several{part}", "1")
        if store.check([f"several{part}"]):
            return RestartInfo(number - 1)
    # One token for the job, from its first start.
    token = store.compare_set("job", "", secrets.token_hex(8)).decode(errors="replace")
    return RestartInfo(number - 1, f"{os.environ.get(_RUN_ID, _UNNAMED)}/{token}{part}")


def _worker_name() -> str:
    """Return the same name in all processes of an agent's worker, another in each worker and restart."""
    count, file = os.environ.get(_COUNT, "0"), os.environ.get(_ERROR_FILE, "")
    created = 0
    # Without error files only the agent's own count is left, which misses restarts when nodes come or go.
    with suppress(OSError, IndexError):
        created = Path(file).parents[1].stat().st_mtime_ns
    return f"{socket.gethostname()}/{count}/{file}/{created}"


def _is_child() -> bool:
    """Return whether the parent is a process of the same worker, not its agent; True if unknown."""
    variable = os.fsencode(f"{_ERROR_FILE}={os.environ.get(_ERROR_FILE, '')}")
    try:
        return variable in Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True


def _lead(store: dist.Store, own: RankIdentity, timeout: timedelta) -> int:
    """Take the next number, and wait until all other ranks have come. Runs on: rank 0."""
    number = store.add("starts", 1)
    others = own.world_size - 1
    restart = part_of(store, f"start{number}")
    write_identity(restart, 0, own)
    store.set("start", str(number))
    if not poll_until(lambda: restart.add("arrived", 0) >= others, timeout):
        raise _missing_ranks_error(own, _arrived(restart, own), timeout)
    restart.set("complete", str(others))
    return number


def _follow(store: dist.Store, own: RankIdentity, timeout: timedelta) -> int:
    """Come under the current number, and wait until rank 0 has counted this rank."""
    number, arrival, counted = 0, 0, 0
    restart: dist.Store = store

    def is_counted() -> bool:
        nonlocal number, arrival, counted, restart
        current = read_value(store, "start", int) if store.check(["start"]) else 0
        if current != number:
            number, restart = current, part_of(store, f"start{current}")
            arrival = restart.add("arrived", 1)
            write_identity(restart, arrival, own)
        counted = read_value(restart, "complete", int) if restart.check(["complete"]) else 0
        return 0 < arrival <= counted

    if poll_until(is_counted, timeout):
        return number
    if counted:
        raise _duplicate_rank_error(own)
    raise _missing_ranks_error(own, _arrived(restart, own) if number else [own], timeout)


def _arrived(restart: dist.Store, own: RankIdentity) -> list[RankIdentity]:
    return read_identities(restart, range(min(restart.add("arrived", 0) + 1, own.world_size)))
