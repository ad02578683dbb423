"""Number the restarts of an elastic job, so that each has its own keys in a store that outlives it.

Nothing in the environment of torchrun's workers says which restart this is: `TORCHELASTIC_RESTART_COUNT` is
each agent's own, and an agent that joins after a failure counts from 0. So the ranks agree through the
agents' store, which still has the keys of ranks that have ended:

- Rank 0 takes the next number and writes it. When all others have come under that number, it writes that the
  restart is complete.
- The others read the number, come, and wait until rank 0 has counted them. A rank that is faster than its
  rank 0 comes under the number of an earlier restart, is not counted, and waits for the next number.

This relies on torch's agents, which start no rank before all ranks of the restart before have ended.

A job of one rank may have several processes, one after another or at once: a sweep whose trials inherit the
rank's variables. They belong to one restart, so the first of them takes its number. The path of the worker's
error file, which all of them inherit, identifies the worker; the agent creates its folder at each restart.
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

from rankwise.environments import ClusterEnvironment, SlurmEnvironment, TorchElasticEnvironment
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import (
    RankIdentity,
    duplicate_rank_error,
    identity_of,
    missing_ranks_error,
    read_identities,
    write_identity,
)
from rankwise.stores.sealed import NamedPrefixStore, job_key_of_environment, part_of, seal
from rankwise.stores.values import read_value
from rankwise.stores.waiting import poll_until

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_COUNT = "TORCHELASTIC_RESTART_COUNT"
_UNNAMED = "none"  # torchrun's default run id


@final
@dataclass(frozen=True)
class RestartInfo:
    """Which restart of a job this is; 0 is the first start.

    `job` identifies it in all restarts; empty where that is unknown, or several processes of a worker train.
    `is_requeued` says that a scheduler has restarted the job: a `ckpt_path` of `fit` counts then.
    """

    number: int = 0
    job: str = ""
    is_requeued: bool = False


_noted: RestartInfo | None = None
# By the address of the agents' store, and the process id where one rank may have several processes.
_agreed: dict[tuple[tuple[str, int], int], RestartInfo] = {}


def note_restart(restart: RestartInfo) -> None:
    """Set what `current_restart` returns."""
    global _noted
    _noted = restart


def current_restart(environment: ClusterEnvironment | None = None) -> RestartInfo:
    """Return this process's restart: what the ranks have agreed on, or else the agent's own count.

    With Slurm's `environment`, the job's, if it is requeued automatically.
    """
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
    """Return the restart that all present ranks belong to; `store` outlives a restart.

    Collective: every rank must call this, once.
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
    count, file = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get(_ERROR_FILE, "")
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
        raise missing_ranks_error(_arrived(restart, own), own.world_size, timeout)
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
        raise duplicate_rank_error(own)
    raise missing_ranks_error(_arrived(restart, own) if number else [own], own.world_size, timeout)


def _arrived(restart: dist.Store, own: RankIdentity) -> list[RankIdentity]:
    return read_identities(restart, range(min(restart.add("arrived", 0) + 1, own.world_size)))
