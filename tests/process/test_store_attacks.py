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
ERROR = "PeerAuthenticationError: "
OF_NO_RANK = f"{ERROR}No rank of the job has written the value of "


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
    assert f"{OF_NO_RANK}'start0/job1/0/" in error
    assert not (folder / "relayed").exists()


@pytest.mark.parametrize(
    ("keys", "lie", "text"),
    [
        *((keys, lie, OF_NO_RANK) for keys in KEYS for lie in ("forge", "flip")),
        *((keys, "other group", ERROR) for keys in ("addresses", "numbers", "outcomes")),
        *((keys, "swap", ERROR) for keys in ("addresses", "numbers")),
    ],
)
def test_forged_values(keys: str, lie: str, text: str, tmp_path: Path) -> None:
    """What no rank has written is an error that says so; so is what is another rank's or another group's."""
    assert text in error_after(keys, lie, tmp_path)


@pytest.mark.parametrize(("keys", "lie"), [("votes", "count"), *((keys, "delay") for keys in KEYS)])
def test_lies_that_change_nothing(keys: str, lie: str, tmp_path: Path) -> None:
    """A stranger who changes what the store counts changes no result, and a delay only delays."""
    assert error_after(keys, lie, tmp_path) == ""


@pytest.mark.parametrize("keys", ["addresses", "numbers", "outcomes", "votes"])
def test_values_of_an_earlier_run_with_the_same_key(keys: str, tmp_path: Path) -> None:
    """They are as wrong as those that no rank has written."""
    assert error_after(keys, "earlier run", tmp_path) == ""  # which is recorded
    assert ERROR in error_after(keys, "earlier run", tmp_path)


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
