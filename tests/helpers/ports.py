"""A port for a program that must be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_chance = random.SystemRandom()  # not the state that tests seed: two runs would take the same


def free_port() -> int:
    """Return a port that was free a moment ago, and that the kernel gives to nobody who takes any."""
    lowest = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 32_768
    while True:
        port = _chance.randrange(
            10_000, min(max(lowest, 10_001), 20_000)
        )  # above, jobs have theirs by their id
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
