"""Status queries: each rank replies where it is, and whether it waits for others."""

from __future__ import annotations

import faulthandler
import json
from typing import final

import torch.distributed as dist

from rankwise.monitoring.heartbeat import FailureTime, own_heartbeat
from rankwise.monitoring.rank_monitor import RankMonitor
from rankwise.processes.stderr import write_stderr
from rankwise.stores.mailbox import send_message
from rankwise.stores.rendezvous import RankIdentity

__all__ = ["StatusReply", "query_status", "reply_key", "reply_to_status_queries"]

_KIND = "status"
_STDERR = 2


@final
class StatusReply:
    """What one rank replied.

    Attributes:
        waits: whether it waits for other ranks.
        line: which rank it is, and where.
    """

    def __init__(self, text: bytes) -> None:
        self.waits, self.line = json.loads(text)

    @staticmethod
    def of_this_rank(own: RankIdentity, gave_up: FailureTime | None = None) -> str:
        """Return the text of this rank's reply.

        Args:
            own: this rank's identity.
            gave_up: when a wait of this rank for others timed out, if one did.
        """
        heartbeat = own_heartbeat() if gave_up is None else gave_up.heartbeat
        seen = (
            "is there"
            if heartbeat is None
            else f"was last in {heartbeat.where()}, {heartbeat.seconds_ago():.0f} s ago"
        )
        waits = gave_up is not None or (heartbeat is not None and heartbeat.waits)
        return json.dumps([waits, f"{own} {seen}"])


def reply_to_status_queries(monitor: RankMonitor, own: RankIdentity, *, shows_stacks: bool) -> None:
    """Reply to the first status query of the job.

    Args:
        monitor: this rank's.
        own: this rank's identity.
        shows_stacks: whether to write this rank's stacks to stderr where the query has a reason.
    """

    def reply(reason: str) -> None:
        # A rank whose own wait has timed out has left its reply already.
        monitor.set_once(reply_key(own.global_rank), StatusReply.of_this_rank(own))
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
