"""Which of this host's addresses, and which interface, leads to another host."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys

from rankwise.errors import ConfigurationError

__all__ = ["address_toward", "interface_toward", "listening_address"]

_DISCARD = 9  # a datagram socket that is connected asks the routing table; nothing is sent
_SIOCGIFCONF = 0x8912  # netdevice(7): the interfaces that have an IPv4 address
_ENTRY_BYTES, _MOST_ENTRIES = 40, 1024


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
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            message=f"Host {host!r} cannot be reached from {socket.gethostname()!r}: {error}.",
            remedy="set MASTER_ADDR to an address of rank 0's node that every node can reach.",
        ) from None


def interface_toward(host: str) -> str | None:
    """Return the name of the interface that leads to `host` (one of this host's own addresses included).

    None where the system does not tell, and for a name that this host knows as a loopback address: others
    know it as another one.

    Raises:
        ConfigurationError: as `address_toward`.
    """
    address = address_toward(host)
    if _is_loopback(address):
        if _is_name(host):
            return None
        return "lo" if sys.platform == "linux" else "lo0"
    return _interfaces().get(address)


def listening_address(main_address: str, other_node: str | None) -> str:
    """Return the address at which rank 0's node listens for the others: never all of them.

    A host often knows its own name as a loopback address, at which no other host can reach it. Then the
    address from which it reaches another node is taken.

    Raises:
        ConfigurationError: as `address_toward`.
    """
    address = address_toward(main_address)
    if other_node is not None and _is_name(main_address) and _is_loopback(address):
        return address_toward(other_node)
    return address


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces() -> dict[str, str]:
    """Return IPv4 address to interface, further addresses of one interface included; empty off Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    buffer = array.array("B", bytes(_ENTRY_BYTES * _MOST_ENTRIES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    entries = [bytes(buffer[start : start + _ENTRY_BYTES]) for start in range(0, filled, _ENTRY_BYTES)]
    return {socket.inet_ntoa(entry[20:24]): entry[:16].partition(b"\0")[0].decode() for entry in entries}
