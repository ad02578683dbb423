"""A port for a program that must be told one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_chance = random.SystemRandom()  # not the state that tests seed: two runs would take the same


def free_port() -> int:
    """Return a port that was free a moment ago, and that the kernel gives to nobody who takes any."""
    lowest = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 32768
    ports = range(10_000, lowest) if lowest > 20_000 else range(49_152, 65_536)
    while True:
        port = _chance.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
