"""Find the address and interface that reach another host, and compute a job's port."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
import zlib
from collections.abc import Sequence

from rankwise.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
_DISCARD_PORT = 9  # connecting a datagram socket looks up the route and sends nothing
_SIOCGIFCONF = 0x8912  # netdevice(7): the interfaces that have an IPv4 address
_SIOCGIFFLAGS, _RUNNING_FLAG = 0x8913, 0x40  # a bridge without other members is not running
_ENTRY_BYTES, _MAX_ENTRIES = 40, 1024
_DOCUMENTATION_ADDRESS = "192.0.2.1"  # RFC 5737: no host has it, so its route is the default route

# Below the kernel's range for outgoing connections (from 32768), above the ports of well-known services.
_FIRST_PORT, _PORT_COUNT = 20_000, 12_000
# Ids of consecutive jobs and steps differ by little: their ports differ for up to this many steps.
_STEPS = 31


def address_toward(host: str) -> str:
    """Return the local address that the route to `host` uses, or raise. Sends nothing."""
    name = host.encode() if host.isascii() else host  # for text, Python imports a codec: 2 MiB in each rank
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(name, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            message=f"Host {host!r} cannot be reached from {socket.gethostname()!r}: {error}.",
            remedy="set MASTER_ADDR to an address of rank 0's node that every node can reach.",
        ) from None


def interface_toward(host: str) -> str | None:
    """Return the name of the interface that the route to `host` uses; `host` may be this host.

    For a name that this host resolves to loopback, it is the interface at which other hosts reach this host;
    None if that is unknown.
    """
    addresses = [address_toward(host)]
    if _is_loopback(addresses[0]):
        if not _is_name(host):
            return LOOPBACK_INTERFACE
        addresses = _external_addresses()
    return interfaces_by_address().get(addresses[0]) if len(addresses) == 1 else None


def listening_address(main_address: str, other_node: str | None = None) -> str:
    """Return the address at which rank 0's node listens for the other nodes; never the wildcard address.

    Hosts often resolve their own name to loopback, where no other host can reach them. Then it is the address
    of the route to another node, or this host's only external address.
    """
    address = address_toward(main_address)
    if not (_is_name(main_address) and _is_loopback(address)):
        return address
    toward_other = address if other_node is None else address_toward(other_node)
    if not _is_loopback(toward_other):
        return toward_other
    addresses = _external_addresses()
    if len(addresses) > 1:
        names = interfaces_by_address()
        listed = ", ".join(f"{each} ({names.get(each, 'unknown')})" for each in addresses)
        raise ConfigurationError(
            message=f"Other nodes cannot reach {main_address!r}: {socket.gethostname()!r} resolves that name "
            f"to {address}, which is loopback.",
            facts=f"it has several other addresses: {listed}.",
            remedy="set MASTER_ADDR to the one that the other nodes reach, on every node; or correct the "
            "name in /etc/hosts.",
        )
    return addresses[0] if addresses else address  # without any, all nodes are this machine


def rendezvous_address(main_address: str, other_node: str | None) -> str:
    """Return the address at which this rank connects to rank 0's node.

    It is `main_address`, except on a host that resolves that name to loopback: this is rank 0's node itself,
    which connects to its listening address. A name that cannot be resolved (yet) is not an error.
    """
    is_here = is_own_loopback_name(main_address)
    return listening_address(main_address, other_node) if is_here else main_address


def is_own_loopback_name(host: str) -> bool:
    """Return whether this is a host name, not `localhost`, that this host resolves to loopback."""
    try:
        return _is_name(host) and _is_loopback(address_toward(host))
    except ConfigurationError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether this is `localhost` or a loopback address."""
    return not _is_name(host) and (host == "localhost" or _is_loopback(host))


def _external_addresses() -> list[str]:
    """Return this host's addresses that are not loopback; on other systems than Linux the default route's."""
    if known := interfaces_by_address():
        return [address for address, name in known.items() if not _is_loopback(address) and _is_running(name)]
    try:
        return [address_toward(_DOCUMENTATION_ADDRESS)]
    except ConfigurationError:
        return []


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces_by_address() -> dict[str, str]:
    """Return the interface of each IPv4 address of this host; empty on other systems than Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    buffer = array.array("B", bytes(_ENTRY_BYTES * _MAX_ENTRIES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    entries = [bytes(buffer[start : start + _ENTRY_BYTES]) for start in range(0, filled, _ENTRY_BYTES)]
    return {socket.inet_ntoa(entry[20:24]): entry[:16].partition(b"\0")[0].decode() for entry in entries}


def _is_running(interface: str) -> bool:
    import fcntl

    request = interface.encode().ljust(_ENTRY_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
    return bool(struct.unpack_from("H", reply, 16)[0] & _RUNNING_FLAG)


def port_of_job(ids: Sequence[str]) -> int:
    """Return a port from 20000 to 31999 for a job with these ids, such as the job's and its step's.

    Numbers are combined so that consecutive jobs and steps get different ports; other ids are hashed.
    """
    number = 0
    for text in ids:
        is_number = text.isascii() and text.isdecimal()
        added = int(text[-18:]) if is_number else zlib.crc32(text.encode("utf-8", "replace"))
        number = number * _STEPS + added
    return _FIRST_PORT + number % _PORT_COUNT
