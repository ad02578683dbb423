"""The address at which rank 0's node listens, on hosts that resolve their own name to loopback; its port."""

import itertools
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from rankwise.environments import network
from rankwise.environments.network import (
    interface_toward,
    is_own_loopback_name,
    listening_address,
    port_of_job,
    rendezvous_address,
)
from rankwise.errors import ConfigurationError

HOSTS = {b"gpu01": "127.0.1.1", b"gpu02": "127.0.0.2", b"named": "127.0.0.1"}
LOOKED_UP = socket.getaddrinfo


@pytest.fixture(autouse=True)
def etc_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the names of `HOSTS` resolve, as in Debian's /etc/hosts."""

    def look_up(host: bytes, *arguments: Any, **options: Any) -> Any:
        return LOOKED_UP(HOSTS.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def have(monkeypatch: pytest.MonkeyPatch, addresses: Mapping[str, str], down: str = "") -> None:
    """Give this host these addresses, by interface."""
    monkeypatch.setattr(
        network, "interfaces_by_address", lambda: {each: name for name, each in addresses.items()}
    )
    monkeypatch.setattr(network, "_is_running", lambda name: name != down)


def test_the_only_address_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to 127.0.1.1 means it, for every rank; a bridge without members does not count."""
    have(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    assert listening_address("gpu01", None) == "10.0.0.1"
    assert rendezvous_address("gpu01", None) == "10.0.0.1"
    assert interface_toward("gpu01") == "eth0"
    have(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1"}, down="docker0")
    assert listening_address("gpu01", None) == "10.0.0.1"


def test_several_external_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several external addresses an error lists them at once."""
    have(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "192.168.0.1"})
    for address_here in (listening_address, rendezvous_address):
        with pytest.raises(
            ConfigurationError, match=r"(?s)'gpu01'.*loopback.*10\.0\.0\.1 \(eth0\), 192\.168\.0\.1 \(eth1\)"
        ):
            address_here("gpu01", None)
    assert interface_toward("gpu01") is None


def test_the_route_to_another_node_selects_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route to another node selects the address; the route to this host does not."""
    have(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    monkeypatch.setattr(
        network,
        "address_toward",
        lambda host: {"node8": "10.1.0.1"}.get(host, HOSTS.get(host.encode(), host)),
    )
    assert listening_address("gpu01", "node8") == "10.1.0.1"
    assert listening_address("gpu01", "gpu02") == "10.0.0.1"


def test_a_host_that_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an external address all nodes are this machine, and use loopback."""
    have(monkeypatch, {"lo": "127.0.0.1"})
    assert listening_address("named", None) == rendezvous_address("named", None) == "127.0.0.1"


def test_addresses_are_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address, or localhost, is used unchanged."""
    have(monkeypatch, {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    for given in ("127.0.0.1", "localhost"):
        assert listening_address(given, "gpu02") == "127.0.0.1"
        assert rendezvous_address(given, "gpu02") == given
        assert interface_toward(given) == "lo"
        assert not is_own_loopback_name(given)


def test_unresolved_names() -> None:
    """A connecting rank keeps an unknown name; a listening one raises."""
    assert rendezvous_address("no such host", None) == "no such host"
    with pytest.raises(ConfigurationError, match="no such host"):
        listening_address("no such host", None)


def test_the_port_of_a_job() -> None:
    """It depends on the job's ids alone, and is above well-known ports and below outgoing connections'."""
    ids = [("0",), ("1", "0"), ("4294967295", "4294967290"), ("391.pbs",), ("",), ("\udcff",), ("9" * 5000,)]
    assert all(20_000 <= port_of_job(job) < 32_000 for job in ids)
    assert port_of_job(["391.pbs", "a"]) == port_of_job(["391.pbs", "a"]) != port_of_job(["392.pbs", "a"])


def test_jobs_and_steps_nearby_do_not_share() -> None:
    """A hundred consecutive jobs of thirty steps each have different ports."""
    pairs = itertools.product(range(1042, 1142), range(30))
    ports = [port_of_job([str(job), str(step)]) for job, step in pairs]
    assert len(set(ports)) == len(ports)
