"""A port for a program that must be told one."""

import random
import socket

_PORTS = range(10_000, 20_000)  # those of jobs by their ids come above, then those that the kernel gives out
_chance = random.SystemRandom()  # not the state that tests seed: two runs would take the same


def free_port() -> int:
    """Return a port that was free a moment ago, and that the kernel gives to nobody who takes any."""
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
