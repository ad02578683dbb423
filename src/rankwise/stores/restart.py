"""Number the restarts of an elastic job, so that each has its own keys in a store that outlives it.

Nothing in the environment of torchrun's workers says which restart this is: `TORCHELASTIC_RESTART_COUNT` is
each agent's own, and an agent that joins after a failure counts from 0. So the ranks agree through the
agents' store, which still has the keys of ranks that have ended:

- Rank 0 takes the next number and writes it. When all others have come under that number, it writes that the
  restart is complete.
- The others read the number, come, and wait until rank 0 has counted them. A rank that is faster than its
  rank 0 reads the number of an earlier restart. It is not counted there, so it waits until its own rank 0
  writes the next number.

This relies on torch's agents, which start no rank before all ranks of the restart before have ended.

A job of one rank may have several processes, one after another or at once: a sweep whose trials inherit the
rank's variables. They belong to one restart, so the first of them takes its number. The path of the worker's
error file, which all of them inherit, identifies the worker; the agent makes its folder anew at each restart.
Nothing identifies the same trial after a restart, so only a process that is alone of its kind resumes a job.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch.distributed as dist

from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import (
    RankIdentity,
    duplicate_rank_error,
    identity_of,
    missing_ranks_error,
    read_identities,
    write_identity,
)
from rankwise.stores.waiting import poll_until

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@final
@dataclass(frozen=True)
class AgentWorker:
    """A worker of an elastic agent.

    Attributes:
        name: the same in all processes of the worker; different in each worker and each restart.
        is_itself: whether the agent has started this very process.
    """

    name: str
    is_itself: bool


def current_agent_worker() -> AgentWorker | None:
    """Return the worker that this process belongs to; None without an elastic agent."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if count is None:
        return None
    # Without error files only the agent's own count is left, which misses restarts when nodes come or go.
    file = os.environ.get(_ERROR_FILE, "")
    created = 0
    if file:
        with suppress(OSError):
            created = Path(file).parent.parent.stat().st_mtime_ns
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        is_itself = os.fsencode(f"{_ERROR_FILE}={file}") not in variables
    except OSError:
        is_itself = False  # unknown: the parent may be a process of the same worker
    return AgentWorker(f"{socket.gethostname()}/{count}/{file}/{created}", is_itself)


_RUN_ID = "TORCHELASTIC_RUN_ID"
_UNNAMED = "none"  # torchrun's default run id


@final
@dataclass(frozen=True)
class RestartInfo:
    """Which restart of a job this is.

    Attributes:
        number: of the restart; 0 for the first start.
        job: identifies the job in all its restarts; empty where that is unknown, or several processes of one
            worker train.
    """

    number: int = 0
    job: str = ""


_noted: RestartInfo | None = None
# By the address of the agents' store, and the process id where one rank may have several processes.
_agreed: dict[tuple[tuple[str, int], int], RestartInfo] = {}


def note_restart(restart: RestartInfo) -> None:
    """Set what `current_restart` returns."""
    global _noted
    _noted = restart


def current_restart() -> RestartInfo:
    """Return this process's restart: what the ranks have agreed on, or else the agent's own count."""
    if _noted is not None:
        return _noted
    run_id = os.environ.get(_RUN_ID, "")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RestartInfo(int(count), "" if run_id == _UNNAMED else run_id)


def find_restart(
    address: tuple[str, int], store: dist.Store, ranks: RankInfo, timeout: timedelta
) -> RestartInfo:
    """Return this process's restart, on which the ranks agree once in the agents' store; note it.

    Collective: every rank must call this.
    """
    key = (address, os.getpid() if ranks.world_size == 1 else 0)
    if key not in _agreed:
        _agreed[key] = agree_on_restart(store, ranks, timeout)
    note_restart(_agreed[key])
    return _agreed[key]


def agree_on_restart(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> RestartInfo:
    """Return the restart that all present ranks belong to.

    Collective: every rank must call this, once.

    Args:
        store: a store that outlives a restart.
        ranks: this process's ranks.
        timeout: how long to wait for the others.

    Raises:
        RendezvousTimeoutError: when not all came in time; names those that did not.
        ProcessGroupError: when all ranks are there, but this one is not among them.
    """
    store = dist.PrefixStore("rankwise", store)
    own = identity_of(ranks)
    worker = current_agent_worker() if ranks.world_size == 1 else None
    if worker is not None:
        number = _lead_once(worker, store, own, timeout)
        if not _is_only_one(worker, store):
            return RestartInfo(number - 1)
    else:
        number = (_lead if ranks.is_global_zero else _follow)(store, own, timeout)
    # One token for the job, from its first start.
    token = store.compare_set("job", "", secrets.token_hex(8)).decode()
    part = "" if worker is None or worker.is_itself else "/child"
    return RestartInfo(number - 1, f"{os.environ.get(_RUN_ID, _UNNAMED)}/{token}{part}")


def _lead_once(worker: AgentWorker, store: dist.Store, own: RankIdentity, timeout: timedelta) -> int:
    """Return the number of a worker's restart, which the first of its processes takes."""
    of_worker = dist.PrefixStore(worker.name, store)
    if not of_worker.check(["number"]):
        of_worker.compare_set("number", "", str(_lead(store, own, timeout)))
    return int(of_worker.get("number"))


def _is_only_one(worker: AgentWorker, store: dist.Store) -> bool:
    """Return whether no restart so far had several such processes: workers, or children of a worker."""
    kind = "itself" if worker.is_itself else "child"
    if dist.PrefixStore(worker.name, store).add(kind, 1) > 1:
        store.set(f"several/{kind}", "1")
    return not store.check([f"several/{kind}"])


def _lead(store: dist.Store, own: RankIdentity, timeout: timedelta) -> int:
    """Take the next number, and wait until all other ranks have come. Runs on: rank 0."""
    number = store.add("starts", 1)
    others = own.world_size - 1
    restart = dist.PrefixStore(f"start{number}", store)
    write_identity(restart, 0, own)
    store.set("start", str(number))
    if not poll_until(lambda: restart.add("arrived", 0) >= others, timeout):
        raise missing_ranks_error(_arrived(restart), own.world_size, timeout)
    restart.set("complete", str(others))
    return number


def _follow(store: dist.Store, own: RankIdentity, timeout: timedelta) -> int:
    """Come under the current number, and wait until rank 0 has counted this rank."""
    number = arrival = 0

    def is_counted() -> bool:
        nonlocal number, arrival
        current = int(store.get("start")) if store.check(["start"]) else 0
        if current != number:
            number, restart = current, dist.PrefixStore(f"start{current}", store)
            arrival = restart.add("arrived", 1)
            write_identity(restart, arrival, own)
        return number > 0 and arrival <= _complete(dist.PrefixStore(f"start{number}", store))

    if not poll_until(is_counted, timeout):
        restart = dist.PrefixStore(f"start{number}", store)
        if _complete(restart):
            raise duplicate_rank_error(own)
        here = _arrived(restart) if number else [own]
        raise missing_ranks_error(here, own.world_size, timeout)
    return number


def _complete(restart: dist.Store) -> int:
    """Return how many ranks belong to a restart beside its rank 0; 0 as long as that is unknown."""
    return int(restart.get("complete")) if restart.check(["complete"]) else 0


def _arrived(restart: dist.Store) -> list[RankIdentity]:
    return read_identities(restart, range(restart.add("arrived", 0) + 1))
