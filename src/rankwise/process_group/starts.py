"""Which start of its job this process belongs to, where an elastic agent may start all ranks again.

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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import final

from rankwise.process_group.meeting import Place, absent, too_many
from rankwise.process_group.workers import Worker, current_worker
from rankwise.ranks import RankInfo

__all__ = ["Start", "agree_on_start", "current_start", "note_start", "start_at"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_RUN_ID = "TORCHELASTIC_RUN_ID"
_UNNAMED = "none"  # torchrun's run id where nobody gives one


@final
@dataclass(frozen=True)
class Start:
    """One of the starts of a job.

    Attributes:
        number: how many there were before.
        job: what all starts of the job have in common, and no other job; empty where that is not known, or
            where several processes of one worker train.
    """

    number: int = 0
    job: str = ""


_noted: Start | None = None
# By the address of the agents' store, and by the process where a rank may be several.
_agreed: dict[tuple[tuple[str, int], int], Start] = {}


def note_start(start: Start) -> None:
    """Note what the launcher knows of this process's start."""
    global _noted
    _noted = start


def current_start() -> Start:
    """Return this process's start; where the ranks have not agreed on it, as its agent counts them."""
    if _noted is not None:
        return _noted
    run_id = os.environ.get(_RUN_ID, "")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Start(int(count), "" if run_id == _UNNAMED else run_id)


def start_at(address: tuple[str, int], store: dist.Store, ranks: RankInfo, timeout: timedelta) -> Start:
    """Return this process's start, given the agents' store; the ranks agree on it once, and it is noted.

    Collective: every rank must call this.

    Raises:
        RendezvousTimeoutError, ProcessGroupError: as `agree_on_start`.
    """
    key = (address, os.getpid() if ranks.world_size == 1 else 0)
    if key not in _agreed:
        _agreed[key] = agree_on_start(store, ranks, timeout)
    note_start(_agreed[key])
    return _agreed[key]


def agree_on_start(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> Start:
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
    mine = Place(
        ranks.global_rank,
        ranks.local_rank,
        ranks.node_rank,
        ranks.world_size,
        socket.gethostname(),
        os.getpid(),
    )
    worker = current_worker() if ranks.world_size == 1 else None
    if worker is not None:
        number = _lead_once(dist.PrefixStore(worker.name, store), store, mine, timeout)
        if not _is_only_one(worker, store):
            return Start(number - 1)
    else:
        number = (_lead if ranks.is_global_zero else _follow)(store, mine, timeout)
    # One token for the job, of whichever start came first.
    token = store.compare_set("job", "", secrets.token_hex(8)).decode()
    part = "" if worker is None or worker.is_itself else "/child"
    return Start(number - 1, f"{os.environ.get(_RUN_ID, _UNNAMED)}/{token}{part}")


def _lead_once(own: dist.Store, store: dist.Store, mine: Place, timeout: timedelta) -> int:
    """Return the number of a worker's start, which the first of its processes takes."""
    if own.check(["number"]):
        return int(own.get("number"))
    return int(own.compare_set("number", "", str(_lead(store, mine, timeout))))


def _is_only_one(worker: Worker, store: dist.Store) -> bool:
    """Return whether no start so far had several processes like this: the worker itself, or its children."""
    kind = "itself" if worker.is_itself else "child"
    if dist.PrefixStore(worker.name, store).add(kind, 1) > 1:
        store.set(f"several/{kind}", "")
    return not store.check([f"several/{kind}"])


def _lead(store: dist.Store, mine: Place, timeout: timedelta) -> int:
    number = store.add("starts", 1)
    others = mine.world_size - 1
    own = dist.PrefixStore(f"start{number}", store)
    own.set("place/0", json.dumps(asdict(mine)))
    store.set("start", str(number))
    if not _wait(lambda: own.add("came", 0) >= others, timeout):
        raise absent(_who_came(own), mine.world_size, timeout)
    own.set("complete", str(others))
    return number


def _follow(store: dist.Store, mine: Place, timeout: timedelta) -> int:
    number = arrival = 0

    def is_in() -> bool:
        nonlocal number, arrival
        said = int(store.get("start")) if store.check(["start"]) else 0
        if said != number:
            number, arrival = said, _come(dist.PrefixStore(f"start{said}", store), mine)
        return number > 0 and arrival <= _complete(dist.PrefixStore(f"start{number}", store))

    if not _wait(is_in, timeout):
        own = dist.PrefixStore(f"start{number}", store)
        if _complete(own):
            raise too_many(mine)
        here = _who_came(own) if number else [mine]
        raise absent(here, mine.world_size, timeout)
    return number


def _come(start: dist.Store, mine: Place) -> int:
    arrival = start.add("came", 1)
    start.set(f"place/{arrival}", json.dumps(asdict(mine)))
    return arrival


def _complete(start: dist.Store) -> int:
    """Return how many belong to a start beside its rank 0; 0 as long as that is not known."""
    return int(start.get("complete")) if start.check(["complete"]) else 0


def _who_came(start: dist.Store) -> list[Place]:
    keys = [f"place/{number}" for number in range(start.add("came", 0) + 1)]
    return [Place(**json.loads(start.get(key))) for key in keys if start.check([key])]


def _wait(is_done: Callable[[], bool], timeout: timedelta) -> bool:
    """Ask again and again, as a wait in a TCP store is in C++, where no signal is heard."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
