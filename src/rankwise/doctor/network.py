"""The report's section on the network: interfaces, the main address, the time of name look-ups."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankwise.doctor.report import Finding, Section
from rankwise.environments.network import (
    address_toward,
    interface_toward,
    interfaces_by_address,
    is_own_loopback_name,
    listening_address,
)
from rankwise.errors import ConfigurationError

_LONGEST_LOOKUP_S = 6.0  # a resolver's own limit is 5 s
_SLOW_LOOKUP_S = 1.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def lookup_seconds() -> float:
    """Return the seconds of the slower of two look-ups: this host's address, and its name."""
    host = socket.gethostname()
    return max(_seconds(lambda: socket.gethostbyname(host)), _seconds(lambda: socket.gethostbyaddr(host)))


def _seconds(look_up: Callable[[], object]) -> float:
    # In a thread: a look-up that hangs cannot be interrupted.
    def run() -> None:
        with contextlib.suppress(OSError):  # an unknown name ends the look-up too
            look_up()

    started = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LONGEST_LOOKUP_S)
    return time.monotonic() - started


def interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each interface; empty off Linux."""
    return {name: address for address, name in reversed(interfaces_by_address().items())}


def examine_network(
    environ: Mapping[str, str],
    main_address: str | None,
    slowest_lookups: Mapping[str, float],
    other_node: str | None = None,
) -> Section:
    """Report through which address and interface the ranks connect.

    Args:
        environ: environment variables.
        main_address: rank 0's address; None on one node.
        slowest_lookups: seconds of each host's name look-up.
        other_node: name of another node than rank 0's, if known.
    """
    there = interfaces()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "interfaces": there,
        "main_address": main_address,
        "interface": None,
        "lookup_seconds": {host: round(seconds, 3) for host, seconds in slowest_lookups.items()},
    }
    if main_address is not None:
        with contextlib.suppress(ConfigurationError):
            facts["interface"] = interface_toward(main_address)
    lines = [f"host name: {facts['host']}"]
    lines += [f"interface {name}: {address}" for name, address in there.items()]
    lines.append(_describe_main_address(main_address, facts["interface"]))
    lines += [
        f"names are looked up in {seconds * 1000:.0f} ms on {host}"
        for host, seconds in slowest_lookups.items()
    ]
    findings = [*_lookup_findings(slowest_lookups), *_interface_findings(environ, there)]
    findings += _address_findings(main_address, other_node)
    return Section("network", "Addresses", facts, lines, findings)


def _describe_main_address(main_address: str | None, interface: str | None) -> str:
    if main_address is None:
        return "the ranks of one node listen on loopback only: no other host can reach them"
    if interface is None:
        return f"rank 0 is at {main_address}"
    return f"rank 0 is at {main_address}, reached through interface {interface}"


def _lookup_findings(slowest: Mapping[str, float]) -> list[Finding]:
    slow = [host for host, seconds in slowest.items() if seconds > _SLOW_LOOKUP_S]
    if not slow:
        return []
    what = (
        f"Looking up host names took {max(slowest.values()):.1f} s on {', '.join(slow)}. torch looks up "
        "names for every connection to its TCP store, so the rendezvous may time out."
    )
    fix = "add the host and its address to /etc/hosts, or correct /etc/resolv.conf."
    return [Finding(what, fix, is_error=False)]


def _interface_findings(environ: Mapping[str, str], known: Mapping[str, str]) -> list[Finding]:
    findings = []
    for variable in _INTERFACE_VARIABLES:
        # NCCL's may be a list, prefixes or an exclusion: check plain names only
        wanted = environ.get(variable, "")
        is_known = any(name.startswith(wanted.lstrip("=")) for name in known)
        if wanted and known and not is_known and wanted.replace("=", "").isalnum():
            what = f"{variable}={wanted} names an interface that this machine does not have."
            findings.append(Finding(what, f"use one of {', '.join(known)}, or unset it."))
    return findings


def _address_findings(main_address: str | None, other_node: str | None) -> list[Finding]:
    if main_address is None:
        return []
    try:
        address_toward(main_address)
    except ConfigurationError as error:
        return [Finding(error.summary(), error.fix())]
    if is_own_loopback_name(main_address):
        return [_own_name_finding(main_address, other_node)]
    # Unlike the host's own name, these are loopback on every node.
    if main_address not in ("localhost", "::1") and not main_address.startswith("127."):
        return []
    what = f"The main address {main_address!r} is loopback, but the job has several nodes."
    fix = (
        "set MASTER_ADDR to an address of rank 0's node that the other nodes can reach. (Nothing, if all "
        "nodes are on this machine.)"
    )
    return [Finding(what, fix, is_error=False)]


def _own_name_finding(main_address: str, other_node: str | None) -> Finding:
    try:
        address = listening_address(main_address, other_node)
    except ConfigurationError as error:
        return Finding(f"{error.summary()} {error.seen()}", error.fix(), is_error=False)
    what = (
        f"This host resolves its own name {main_address!r} to loopback (as Debian's /etc/hosts does). "
        f"The rendezvous is at {address}: the other nodes must resolve the name to that address."
    )
    fix = f"nothing, if they do; otherwise set MASTER_ADDR={address} (or the right one) on every node."
    return Finding(what, fix, is_error=False)
