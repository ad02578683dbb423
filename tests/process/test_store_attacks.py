"""A stranger who may write to a job's TCP store reads nothing, changes nothing, and makes no rank hang."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.errors import WorkerError
from tests.helpers.load import slowdown
from tests.process import relay
from tests.process.store_attacks import KEYS, LIES, RIGHT, SECRET, Attack, AttackedDDP, share

SECONDS = 3.0  # for the rendezvous, and for each collective
TRIES = 40
OUR_ERRORS = r"PeerAuthenticationError: |RendezvousTimeoutError: |[Ww]ait timeout after|ProcessGroupError: "


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give a folder beside which the relay runs."""
    process = subprocess.Popen([sys.executable, relay.__file__, str(tmp_path)])
    try:
        while not (tmp_path / "port").exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield tmp_path
    finally:
        process.kill()
        process.wait()


def error_after(keys: str, lie: str, folder: Path) -> str:
    """Run a job whose store lies; return its error, or nothing if all ranks received what was sent."""
    strategy = AttackedDDP(Attack(keys, lie, folder), SECONDS * slowdown())
    began, error = time.monotonic(), ""
    try:
        strategy.launch(share)
    except WorkerError as raised:
        error = str(raised)
    else:
        assert strategy.results == {0: RIGHT, 1: RIGHT}
    assert time.monotonic() - began < 5 * SECONDS * slowdown()
    seen = folder / "relayed"
    assert not seen.exists() or SECRET.encode() not in seen.read_bytes()
    return error


@pytest.mark.quick
def test_addresses_of_a_relay(folder: Path) -> None:
    """A stranger who puts his address in the place of both ranks' gets no connection."""
    error = error_after("addresses", "relay", folder)
    assert "PeerAuthenticationError: No rank of the job has written the value of 'start0/job1/0/" in error
    assert not (folder / "relayed").exists()


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("lie", ["forge", "flip"])
def test_forged_values(keys: str, lie: str, tmp_path: Path) -> None:
    """What no rank has written is an error that says so."""
    error = error_after(keys, lie, tmp_path)
    assert "PeerAuthenticationError: No rank of the job has written the value of " in error


def test_votes_that_no_rank_has_cast(tmp_path: Path) -> None:
    """A stranger who changes what the store counts changes no result."""
    assert error_after("votes", "count", tmp_path) == ""


@pytest.mark.parametrize("keys", ["addresses", "numbers", "outcomes", "votes"])
def test_values_of_an_earlier_run_with_the_same_key(keys: str, tmp_path: Path) -> None:
    """They are as wrong as those that no rank has written."""
    assert error_after(keys, "earlier run", tmp_path) == ""  # which is recorded
    assert "PeerAuthenticationError: " in error_after(keys, "earlier run", tmp_path)


@pytest.mark.parametrize("keys", ["addresses", "numbers", "outcomes"])
def test_values_of_another_group(keys: str, tmp_path: Path) -> None:
    """What one group wrote is wrong in another."""
    assert "PeerAuthenticationError: " in error_after(keys, "other group", tmp_path)


@pytest.mark.parametrize("keys", ["addresses", "numbers"])
def test_exchanged_values(keys: str, tmp_path: Path) -> None:
    """What a rank wrote is wrong in the place of another's."""
    assert "PeerAuthenticationError: " in error_after(keys, "swap", tmp_path)


@pytest.mark.parametrize("keys", KEYS)
def test_values_that_come_late(keys: str, tmp_path: Path) -> None:
    """A delay only delays."""
    assert error_after(keys, "delay", tmp_path) == ""


@pytest.mark.parametrize("keys", ["addresses", pytest.param("numbers", marks=pytest.mark.soak)])
def test_values_that_never_come(keys: str, tmp_path: Path) -> None:
    """The job ends in an error, in time."""
    assert error_after(keys, "drop", tmp_path) != ""


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("keys", KEYS)
def test_forty_attacks(keys: str, lie: str, folder: Path) -> None:
    """No try succeeds, whatever the order in which the ranks come."""
    error_after(keys, lie, folder)  # later runs may replay what is read in this one
    for _ in range(TRIES):
        error_after(keys, lie, folder)
