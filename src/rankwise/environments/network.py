"""Which of this host's addresses and interfaces leads to another host, and the port of a job."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
import zlib
from collections.abc import Sequence

from rankwise.errors import ConfigurationError

__all__ = [
    "address_toward",
    "interface_toward",
    "interfaces_by_address",
    "is_own_loopback_name",
    "listening_address",
    "meeting_address",
]

_DISCARD = 9  # a datagram socket that is connected asks the routing table; nothing is sent
_SIOCGIFCONF = 0x8912  # netdevice(7): the interfaces that have an IPv4 address
_SIOCGIFFLAGS, _IS_RUNNING = 0x8913, 0x40  # a bridge with nobody on it is not
_ENTRY_BYTES, _MOST_ENTRIES = 40, 1024
_SOMEWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the way there is the default route


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

    For a name that this host knows as a loopback address, the one at which others reach this host; None
    where the system does not tell which that is.

    Raises:
        ConfigurationError: as `address_toward`.
    """
    address = address_toward(host)
    if _is_loopback(address) and _is_name(host):
        choice = _addresses_for_others()
        return interfaces_by_address().get(choice[0]) if len(choice) == 1 else None
    if _is_loopback(address):
        return "lo" if sys.platform == "linux" else "lo0"
    return interfaces_by_address().get(address)


def listening_address(main_address: str, other_node: str | None) -> str:
    """Return the address at which rank 0's node listens for the others: never all of them.

    A host often knows its own name as a loopback address, at which no other host can reach it. Then it is the
    address from which it reaches another node, or the only one that it has for others.

    Raises:
        ConfigurationError: as `address_toward`; and where this host has several such addresses.
    """
    address = address_toward(main_address)
    if not (_is_name(main_address) and _is_loopback(address)):
        return address
    toward_other = address if other_node is None else address_toward(other_node)
    if not _is_loopback(toward_other):
        return toward_other
    choice = _addresses_for_others()
    if len(choice) > 1:
        raise _which_of_them(main_address, address, choice)
    return choice[0] if choice else address  # with none, all nodes are this machine


def meeting_address(main_address: str, other_node: str | None) -> str:
    """Return where a rank finds rank 0's node: at `main_address`.

    A host that knows that name as a loopback address is that node itself: there, where it listens.

    Raises:
        ConfigurationError: as `listening_address`, but for a name that is not known, or not yet.
    """
    is_here = is_own_loopback_name(main_address)
    return listening_address(main_address, other_node) if is_here else main_address


def is_own_loopback_name(host: str) -> bool:
    """Return whether this is a host name, not `localhost`, that this host knows as a loopback address."""
    try:
        return _is_name(host) and _is_loopback(address_toward(host))
    except ConfigurationError:
        return False


def _addresses_for_others() -> list[str]:
    """Return this host's own addresses that are not loopback; off Linux, the default route's."""
    if known := interfaces_by_address():
        return [address for address, name in known.items() if not _is_loopback(address) and _carries(name)]
    try:
        return [address_toward(_SOMEWHERE)]
    except ConfigurationError:
        return []


def _which_of_them(main_address: str, address: str, choice: Sequence[str]) -> ConfigurationError:
    names = interfaces_by_address()
    return ConfigurationError(
        message=f"Other nodes cannot reach {main_address!r}: {socket.gethostname()!r} knows that name as "
        f"{address}, which is loopback.",
        facts="it has several other addresses: "
        + ", ".join(f"{each} ({names.get(each, 'unknown')})" for each in choice)
        + ".",
        remedy="set MASTER_ADDR to the one that the other nodes reach, on every node; or correct the name in "
        "/etc/hosts.",
    )


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces_by_address() -> dict[str, str]:
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


def _carries(interface: str) -> bool:
    import fcntl

    request = interface.encode().ljust(_ENTRY_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
    return bool(struct.unpack_from("H", answer, 16)[0] & _IS_RUNNING)


# Below the kernel's range for outgoing connections (from 32768), above the ports of well-known services.
_FIRST, _COUNT = 20_000, 12_000
# Steps of one job, and jobs one after another, are neighbours: they differ for sure up to this many steps.
_STEPS = 31


def port_of_job(ids: Sequence[str]) -> int:
    """Return a port from 20000 to 31999 for a job that has these ids: the job's, its step's.

    Plain numbers are mixed so that neighbouring jobs and steps never meet; other ids are hashed.
    """
    number = 0
    for text in ids:
        number = number * _STEPS + _as_number(text)
    return _FIRST + number % _COUNT


def _as_number(text: str) -> int:
    is_plain = text.isascii() and text.isdecimal()
    return int(text[-18:]) if is_plain else zlib.crc32(text.encode("utf-8", "replace"))
