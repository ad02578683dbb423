"""The seat that a re-run script inherits from the main process that started it."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass

from typing_extensions import final

from rankwise import _tied
from rankwise.launchers._channel import Kind, RankChannel
from rankwise.launchers._signals import leave_interrupts_to_the_main_process
from rankwise.launchers._stacks import write_stacks_on_signal
from rankwise.process_group.pulse import write_pulse_to
from rankwise.ranks import RankInfo


@final
@dataclass
class InheritedSeat:
    """This process is a worker of strategy `"ddp"`: its place, its channel, the file for its values."""

    ranks: RankInfo
    address: tuple[str, int] | None
    run_id: str
    channel: RankChannel
    value_descriptor: int
    pulse_descriptor: int
    jobs: int = 0


_seat: InheritedSeat | None = None


def inherited_seat() -> InheritedSeat | None:
    """Return this process's seat, or None where nobody re-ran it."""
    return _seat


def describe_seat(
    ranks: RankInfo,
    address: tuple[str, int] | None,
    run_id: str,
    *,
    channel: int,
    value_descriptor: int,
    pulse_descriptor: int,
) -> str:
    """Write a seat for the environment variable through which a re-run script finds it."""
    fields = {
        "ranks": dataclasses.asdict(ranks),
        "address": address,
        "run_id": run_id,
        "channel": channel,
        "value_descriptor": value_descriptor,
        "pulse_descriptor": pulse_descriptor,
    }
    return json.dumps(fields)


def take_seat(description: str) -> None:
    """Take the seat: from here on this process leaves when the main process does.

    Mutates: the handler of SIGINT, which is the main process's to answer.
    """
    global _seat
    fields = json.loads(description)
    address = fields["address"]
    os.set_inheritable(fields["channel"], False)
    os.set_inheritable(fields["value_descriptor"], False)
    os.set_inheritable(fields["pulse_descriptor"], False)
    _tied.tie_children_to_this_process()
    leave_interrupts_to_the_main_process()
    _seat = InheritedSeat(
        ranks=RankInfo(**fields["ranks"]),
        address=None if address is None else (address[0], address[1]),
        run_id=fields["run_id"],
        channel=RankChannel(socket.socket(fileno=fields["channel"]), on_lost=_leave),
        value_descriptor=fields["value_descriptor"],
        pulse_descriptor=fields["pulse_descriptor"],
    )
    write_pulse_to(_seat.pulse_descriptor)
    write_stacks_on_signal()
    _seat.channel.send(Kind.HELLO)


def _leave() -> None:
    os._exit(1)
