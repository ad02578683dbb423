"""What a re-run script finds of its place in the job, and how a worker waits for the end."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import final

from rankwise.errors import RendezvousTimeoutError
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.monitoring.heartbeat import write_heartbeat_to
from rankwise.monitoring.stacks import write_stacks_on_signal
from rankwise.processes import parent_death
from rankwise.processes.signals import ignore_interrupts_in_workers
from rankwise.processes.started_process import is_suspended
from rankwise.ranks import RankInfo


@final
@dataclass
class InheritedContext:
    """This process is a worker of strategy `"ddp"`: its place, its channel, the file for its values."""

    ranks: RankInfo
    address: tuple[str, int] | None
    run_id: str
    channel: RankChannel
    value_descriptor: int
    heartbeat_descriptor: int
    jobs: int = 0


_worker: InheritedContext | None = None


def inherited_context() -> InheritedContext | None:
    """Return this process's context, or None if no launcher started it again."""
    return _worker


def describe_context(
    ranks: RankInfo,
    address: tuple[str, int] | None,
    run_id: str,
    *,
    channel: int,
    value_descriptor: int,
    heartbeat_descriptor: int,
) -> str:
    """Encode a context for the environment variable of a script that is run again."""
    fields = {
        "ranks": dataclasses.asdict(ranks),
        "address": address,
        "run_id": run_id,
        "channel": channel,
        "value_descriptor": value_descriptor,
        "heartbeat_descriptor": heartbeat_descriptor,
    }
    return json.dumps(fields)


def attach(description: str) -> None:
    """Attach to the main process: this process exits when the main process does.

    Mutates: the handler of SIGINT, which is the main process's to answer.
    """
    global _worker
    fields = json.loads(description)
    address = fields["address"]
    os.set_inheritable(fields["channel"], False)
    os.set_inheritable(fields["value_descriptor"], False)
    os.set_inheritable(fields["heartbeat_descriptor"], False)
    parent_death.end_children_with_this_process()
    ignore_interrupts_in_workers()
    _worker = InheritedContext(
        ranks=RankInfo(**fields["ranks"]),
        address=None if address is None else (address[0], address[1]),
        run_id=fields["run_id"],
        channel=RankChannel(socket.socket(fileno=fields["channel"]), on_lost=_leave),
        value_descriptor=fields["value_descriptor"],
        heartbeat_descriptor=fields["heartbeat_descriptor"],
    )
    write_heartbeat_to(_worker.heartbeat_descriptor)
    write_stacks_on_signal()
    _worker.channel.send(Kind.HELLO)


def _leave() -> None:
    os._exit(1)


_LOOKS = 8


def wait_until_over(channel: RankChannel, timeout_s: float | None) -> None:
    """Wait until the job is over on every rank.

    The main process may take its time, but not suspended: nothing else could end this wait then.

    Raises:
        RendezvousTimeoutError: when it was found suspended for longer than `timeout_s`.
    """
    suspended_at_s: float | None = None
    while not channel.is_over_within(None if timeout_s is None else timeout_s / _LOOKS):
        now_s = time.monotonic()
        if timeout_s is None or not is_suspended(os.getppid()):
            suspended_at_s = None
        elif suspended_at_s is None:
            suspended_at_s = now_s
        elif now_s - suspended_at_s > timeout_s:
            raise RendezvousTimeoutError("the main process, which is suspended", timeout_s)
