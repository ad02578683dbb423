"""Which start of an elastic job this is, so that a store that outlives a start keeps them apart.

All of a worker's processes inherit the path of its error file. Torch's agent makes the folder anew, under the
same name or another, each time that it starts its ranks. A session would not tell: a worker's child may have
one of its own, and workers that run a function have none.

Under torchrun nothing in the environment says so. Its restart count is each agent's own: an agent that joins
the others after their failure counts nothing. The store that its ranks share, though, outlives them, and with
it the keys of ranks that are gone. So the ranks of a start find one another in that store:

- Rank 0 takes the next number, says it, and then says how many have come to it under that number.
- The others come to the number that they read, and go on when they are among those who have come. A number
  that is an earlier start's is read by a rank that is faster than its rank 0. Then it waits: either that
  start was complete, and this rank came too late to be counted, or its rank 0 is gone and counts nobody.
  What ends the wait is the number of its own rank 0.

This rests on what a rendezvous of torch's agents is: nobody starts a rank before all have ended theirs.

A rank that is alone may be several processes, one after another or at once: a sweep, whose trials inherit the
rank's variables. They belong to one start, so the first of them takes its number. Nothing tells in the next
start which of them is which, so only a process that is alone of its kind has a job to go on with.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch.distributed as dist

from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity, duplicate_rank_error, missing_ranks_error
from rankwise.stores.waiting import poll_until

__all__ = [
    "RestartInfo",
    "AgentWorker",
    "agree_on_restart",
    "current_restart",
    "current_agent_worker",
    "note_restart",
    "find_restart",
]

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@final
@dataclass(frozen=True)
class AgentWorker:
    """A worker of an elastic agent.

    Attributes:
        name: the same in all of its processes, and in those of no other worker and no other start.
        is_itself: whether the agent has started this process, and not another of the worker's.
    """

    name: str
    is_itself: bool


def current_agent_worker() -> AgentWorker | None:
    """Return the worker that this process belongs to; None where no agent has started it."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if count is None:
        return None
    file = os.environ.get(_ERROR_FILE, "")
    # Without error files the agent's own count is left, which leaves out restarts where nodes come or go.
    made = _when_made(Path(file).parent.parent) if file else 0
    return AgentWorker(f"{socket.gethostname()}/{count}/{file}/{made}", not _is_of_parent(file))


def _when_made(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _is_of_parent(file: str) -> bool:
    """Return whether the parent has that error file too; True where that is not known."""
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return os.fsencode(f"{_ERROR_FILE}={file}") in variables


_RUN_ID = "TORCHELASTIC_RUN_ID"
_UNNAMED = "none"  # torchrun's run id where nobody gives one


@final
@dataclass(frozen=True)
class RestartInfo:
    """One of the starts of a job.

    Attributes:
        number: how many there were before.
        job: what all starts of the job have in common, and no other job; empty where that is not known, or
            where several processes of one worker train.
    """

    number: int = 0
    job: str = ""


_noted: RestartInfo | None = None
# By the address of the agents' store, and by the process where a rank may be several.
_agreed: dict[tuple[tuple[str, int], int], RestartInfo] = {}


def note_restart(start: RestartInfo) -> None:
    """Note what the launcher knows of this process's start."""
    global _noted
    _noted = start


def current_restart() -> RestartInfo:
    """Return this process's start; where the ranks have not agreed on it, as its agent counts them."""
    if _noted is not None:
        return _noted
    run_id = os.environ.get(_RUN_ID, "")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RestartInfo(int(count), "" if run_id == _UNNAMED else run_id)


def find_restart(
    address: tuple[str, int], store: dist.Store, ranks: RankInfo, timeout: timedelta
) -> RestartInfo:
    """Return this process's start, given the agents' store; the ranks agree on it once, and it is noted.

    Collective: every rank must call this.

    Raises:
        RendezvousTimeoutError, ProcessGroupError: as `agree_on_restart`.
    """
    key = (address, os.getpid() if ranks.world_size == 1 else 0)
    if key not in _agreed:
        _agreed[key] = agree_on_restart(store, ranks, timeout)
    note_restart(_agreed[key])
    return _agreed[key]


def agree_on_restart(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> RestartInfo:
    """Return the start that all ranks which are here now belong to.

    Collective: every rank must call this, once.

    Args:
        store: one that outlives the starts.
        ranks: who this process is.
        timeout: how long to wait for the others.

    Raises:
        RendezvousTimeoutError: when not all came in time; names those that did not.
        ProcessGroupError: when all ranks are there, but this one is not among them.
    """
    store = dist.PrefixStore("rankwise", store)
    mine = RankIdentity(
        ranks.global_rank,
        ranks.local_rank,
        ranks.node_rank,
        ranks.world_size,
        socket.gethostname(),
        os.getpid(),
    )
    worker = current_agent_worker() if ranks.world_size == 1 else None
    if worker is not None:
        number = _lead_once(dist.PrefixStore(worker.name, store), store, mine, timeout)
        if not _is_only_one(worker, store):
            return RestartInfo(number - 1)
    else:
        number = (_lead if ranks.is_global_zero else _follow)(store, mine, timeout)
    # One token for the job, of whichever start came first.
    token = store.compare_set("job", "", secrets.token_hex(8)).decode()
    part = "" if worker is None or worker.is_itself else "/child"
    return RestartInfo(number - 1, f"{os.environ.get(_RUN_ID, _UNNAMED)}/{token}{part}")


def _lead_once(own: dist.Store, store: dist.Store, mine: RankIdentity, timeout: timedelta) -> int:
    """Return the number of a worker's start, which the first of its processes takes."""
    if own.check(["number"]):
        return int(own.get("number"))
    return int(own.compare_set("number", "", str(_lead(store, mine, timeout))))


def _is_only_one(worker: AgentWorker, store: dist.Store) -> bool:
    """Return whether no start so far had several processes like this: the worker itself, or its children."""
    kind = "itself" if worker.is_itself else "child"
    if dist.PrefixStore(worker.name, store).add(kind, 1) > 1:
        store.set(f"several/{kind}", "")
    return not store.check([f"several/{kind}"])


def _lead(store: dist.Store, mine: RankIdentity, timeout: timedelta) -> int:
    number = store.add("starts", 1)
    others = mine.world_size - 1
    own = dist.PrefixStore(f"start{number}", store)
    own.set("place/0", json.dumps(asdict(mine)))
    store.set("start", str(number))
    if not poll_until(lambda: own.add("came", 0) >= others, timeout):
        raise missing_ranks_error(_who_came(own), mine.world_size, timeout)
    own.set("complete", str(others))
    return number


def _follow(store: dist.Store, mine: RankIdentity, timeout: timedelta) -> int:
    number = arrival = 0

    def is_in() -> bool:
        nonlocal number, arrival
        said = int(store.get("start")) if store.check(["start"]) else 0
        if said != number:
            number, arrival = said, _come(dist.PrefixStore(f"start{said}", store), mine)
        return number > 0 and arrival <= _complete(dist.PrefixStore(f"start{number}", store))

    if not poll_until(is_in, timeout):
        own = dist.PrefixStore(f"start{number}", store)
        if _complete(own):
            raise duplicate_rank_error(mine)
        here = _who_came(own) if number else [mine]
        raise missing_ranks_error(here, mine.world_size, timeout)
    return number


def _come(start: dist.Store, mine: RankIdentity) -> int:
    arrival = start.add("came", 1)
    start.set(f"place/{arrival}", json.dumps(asdict(mine)))
    return arrival


def _complete(start: dist.Store) -> int:
    """Return how many belong to a start beside its rank 0; 0 as long as that is not known."""
    return int(start.get("complete")) if start.check(["complete"]) else 0


def _who_came(start: dist.Store) -> list[RankIdentity]:
    keys = [f"place/{number}" for number in range(start.add("came", 0) + 1)]
    return [RankIdentity(**json.loads(start.get(key))) for key in keys if start.check([key])]
