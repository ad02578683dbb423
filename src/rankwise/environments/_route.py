"""Which of this host's addresses, and which interface, leads to another host."""

from __future__ import annotations

import socket

from rankwise.errors import ConfigurationError

__all__ = ["address_toward"]

_DISCARD = 9  # a datagram socket that is connected asks the routing table; nothing is sent


def address_toward(host: str) -> str:
    """Return the local address from which `host` is reached. Sends nothing.

    Raises:
        ConfigurationError: when the name cannot be resolved, or no route leads there.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            message=f"Host {host!r} cannot be reached from {socket.gethostname()!r}: {error}.",
            remedy="set MASTER_ADDR to an address of rank 0's node that every node can reach.",
        ) from None
