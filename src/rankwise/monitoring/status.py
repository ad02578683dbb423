"""Status queries: each rank replies where it is, and whether it waits for others."""

from __future__ import annotations

import faulthandler
import json

import torch.distributed as dist

from rankwise.monitoring.heartbeat import FailureTime, Heartbeat, own_heartbeat
from rankwise.monitoring.rank_monitor import RankMonitor, send_message
from rankwise.processes.stderr import write_stderr
from rankwise.stores.rendezvous import RankIdentity

_KIND = "status"
_STDERR = 2


def own_status(own: RankIdentity, gave_up: FailureTime | None = None) -> str:
    """Return this rank's reply: whether it waits for other ranks, and a line with its phase, as JSON.

    Args:
        own: this rank's identity.
        gave_up: when a wait of this rank for others timed out, if one did.
    """
    heartbeat = own_heartbeat() if gave_up is None else gave_up.heartbeat
    waits = gave_up is not None or (heartbeat is not None and heartbeat.waits)
    return json.dumps([waits, f"{own} is there" if heartbeat is None else status_line(own, heartbeat)])


def status_line(identity: RankIdentity, heartbeat: Heartbeat) -> str:
    """Return a rank's phase, and for how long it is in it."""
    return f"{identity} was last in {heartbeat.where()}, {heartbeat.seconds_ago():.0f} s ago"


def reply_to_status_queries(monitor: RankMonitor, own: RankIdentity, *, shows_stacks: bool) -> None:
    """Reply to the first status query of the job.

    Args:
        monitor: this rank's.
        own: this rank's identity.
        shows_stacks: whether to write this rank's stacks to stderr where the query has a reason.
    """

    def reply(reason: str) -> None:
        # A rank whose own wait has timed out has left its reply already.
        monitor.set_once(reply_key(own.global_rank), own_status(own))
        if shows_stacks and reason:
            write_stderr(f"rankwise: {reason}; stacks of {own}:\n")
            faulthandler.dump_traceback(_STDERR, all_threads=True)

    monitor.subscribe(_KIND, reply)


def query_status(store: dist.Store, world_size: int, reason: str = "") -> None:
    """Ask every rank for its status; with a reason also for its stacks."""
    send_message(store, range(world_size), _KIND, reason)


def reply_key(rank: int) -> str:
    """Return the key of a rank's reply."""
    return f"status/{rank}"
