"""What the doctor says about a mapping of variables, without starting or meeting anybody."""

import re
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from rankwise.doctor import Report, examination
from rankwise.doctor.examination import describe_measurements, describe_ranks, examine, examine_network
from rankwise.environments import LocalEnvironment, network
from rankwise.environments.detect import environment_names
from rankwise.ranks import rank_zero_only

BY_HAND = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this host's name be looked up at once: a resolver that does not answer is a finding."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setattr(socket, "gethostbyaddr", lambda name: (name, [], ["127.0.0.1"]))


def examined(environ: Mapping[str, str], devices: str = "auto") -> tuple[Report, bool]:
    return examine(environ, devices=devices, runs_collectives=False)


def facts(report: Report, key: str) -> Mapping[str, object]:
    [section] = [section for section in report.sections if section.key == key]
    result: Mapping[str, object] = section.facts
    return result


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, with no rank known, a process is healthy, and told what to do next; of two ranks one speaks."""
    monkeypatch.setattr(LocalEnvironment, "global_rank", property(lambda self: self._number("RANK")))
    report, speaks = examined({})
    assert speaks
    assert report.findings == []
    assert facts(report, "environment")["name"] == "local"
    assert 'Trainer(strategy="ddp", devices=2)' in report.advice()
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    assert [examined({**BY_HAND, "RANK": r, "LOCAL_RANK": r})[1] for r in "01"] == [True, False]


def test_a_preset_variable() -> None:
    """A machine may preset a variable of a launcher: that is no error."""
    [finding] = examined({"LOCAL_WORLD_SIZE": "2"})[0].findings
    assert finding.what.startswith("LOCAL_WORLD_SIZE=2 is set without the other variables")
    assert not finding.is_error


def test_why_not_others() -> None:
    """Each launcher that was passed over is named with its reason."""
    report, _ = examined({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"})
    assert set(facts(report, "environment")["rejected"]) == {*environment_names()} - {"local"}  # type: ignore[call-overload]  # a mapping
    lines = "\n".join(report.sections[1].lines)
    assert re.search(r"^not slurm: .*SLURM_STEP_ID is not set", lines, re.MULTILINE)


def test_wrong_variables() -> None:
    """What a launcher left incomplete is wrong, with the error's own fix; so are more devices than ranks."""
    report, _ = examined({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"})
    assert not report.is_healthy
    assert facts(report, "environment")["name"] is None
    assert "WORLD_SIZE" in report.findings[0].what
    assert report.findings[0].fix
    report, _ = examined(BY_HAND, devices="3")
    assert [finding.is_error for finding in report.findings] == [True]
    assert "3" in report.findings[0].what


@pytest.mark.parametrize(
    ("environ", "said"),
    [({"SLURM_JOB_ID": "12"}, "put srun before the command"), ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set")],
)
def test_notes_when_alone(environ: Mapping[str, str], said: str) -> None:
    """A scheduler's job without its starter, and a lone preset, are noted, and are no error."""
    report, _ = examined(environ)
    assert report.is_healthy
    assert said in report.advice()


def test_known_to_crash() -> None:
    """A variable that makes torch crash is wrong."""
    report, _ = examined({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert "TORCH_DISTRIBUTED_DEBUG=INFO" in report.findings[0].fix


def test_interfaces() -> None:
    """Loopback is among the interfaces, and what is at it is reached through it."""
    facts = examine_network({}, "127.0.0.1", {}).facts
    assert facts["interfaces"]["lo"] == "127.0.0.1"
    assert facts["interface"] == "lo"
    assert examine_network({"GLOO_SOCKET_IFNAME": "lo"}, None, {}).findings == []


@pytest.mark.parametrize(
    ("environ", "address", "lookups_s", "is_error", "what", "fix"),
    [
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, None, {}, True, "GLOO_SOCKET_IFNAME=nosuch0", "unset it"),
        ({}, None, {"fast": 0.01, "slow": 5.0}, False, "5.0 s on slow", "/etc/hosts"),
        ({}, "127.0.0.1", {}, False, "loopback", "MASTER_ADDR"),
        ({}, "no such host", {}, True, "cannot be reached", "MASTER_ADDR"),
    ],
    ids=["no interface", "slow lookups", "loopback", "no way"],
)
def test_networks(
    environ: dict[str, str], address: str | None, lookups_s: Any, is_error: bool, what: str, fix: str
) -> None:
    """An interface or main address that is not there is wrong; loopback and slow lookups are noted."""
    [finding] = examine_network(environ, address, lookups_s).findings
    assert finding.is_error == is_error
    assert what in finding.what
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ({"10.0.0.1": "eth0"}, "The rendezvous is at 10.0.0.1"),
        ({"10.0.0.1": "eth0", "10.1.0.1": "eth1"}, "10.0.0.1 (eth0), 10.1.0.1 (eth1)"),
    ],
    ids=["one", "two"],
)
def test_a_host_that_is_loopback_to_itself(
    addresses: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noted where the ranks meet then, or that this cannot be told, and what to set."""
    look_up = partial(socket.getaddrinfo, "127.0.1.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **options: look_up(*more, **options))
    monkeypatch.setattr(network, "interfaces_by_address", lambda: addresses)
    monkeypatch.setattr(network, "_is_running", lambda name: True)
    [note] = examine_network({}, "gpu01", {}).findings
    assert not note.is_error
    assert said in note.what
    assert "MASTER_ADDR" in note.fix


def rank(number: int, torch_version: str = "2.13.0", device: str = "cpu") -> dict[str, Any]:
    place = {"global_rank": number, "node_rank": 0, "local_rank": number, "host": "host", "device": device}
    return {**place, "device_name": "", "pid": 100, "threads": 1, "versions": {"torch": torch_version}}


def test_different_versions() -> None:
    """Ranks that differ in a version are grouped by it."""
    ranks = (rank(0), rank(1, "2.6.0"), rank(2))
    [finding] = describe_ranks(examination.JobFacts("gloo", ranks, ()), "started by hand").findings
    assert "torch: 2.13.0 on ranks 0, 2; 2.6.0 on ranks 1" in finding.what


def test_a_shared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host with the same device share it, unless each sees one device only, or may do so."""
    job = examination.JobFacts("gloo", [rank(0, device="cuda:0"), rank(1, device="cuda:0")], ())
    for visible, levels in ("", [False]), ("0,1", [True]), ("3", []):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [found.is_error for found in describe_ranks(job, "torchrun").findings] == levels


def test_wrong_sums() -> None:
    """An all-reduce whose sum was wrong on any rank is wrong."""
    right = {"size": 4, "seconds": 0.001, "bytes_per_second": 4000.0, "is_right": True}
    measured = (right, {**right, "size": 4096, "bytes_per_second": 4e6, "is_right": False})
    section = describe_measurements(examination.JobFacts("gloo", (rank(0), rank(1)), measured))
    assert [finding.what for finding in section.findings] == ["The all-reduce of 4 KiB gave wrong sums."]
    assert section.lines[-1].split() == ["4", "KiB", "1.000", "ms", "3.81", "MiB/s"]


@pytest.mark.parametrize(
    ("working", "advice"),
    [
        (("spawn", "fork"), 'use strategy="ddp_spawn" instead.'),
        ((), "no start method works: check whether processes may be started here (ulimit -u, seccomp)."),
    ],
)
def test_start_methods_that_fail(
    monkeypatch: pytest.MonkeyPatch, working: tuple[str, ...], advice: str
) -> None:
    """Each is a finding, with the remedy of its error, or else the first method that works."""

    def result_of(method: str, timeout_s: float) -> dict[str, Any]:
        fix = "unset IT." if method == "forkserver" else ""
        return {"works": method in working, "seconds": timeout_s, "problem": f"{method} failed.", "fix": fix}

    monkeypatch.setattr(examination, "_result_of", result_of)
    said: list[str] = []
    section = examination.examine_start_methods(1.5, said.append)
    assert said[0] == "starting two processes by 'popen' (at most 1.5 s)"
    found = {finding.what: finding.fix for finding in section.findings}
    assert len(found) == 4 - len(working)
    assert found['strategy="ddp" does not work here: popen failed.'] == advice
    assert found['strategy="ddp_forkserver" does not work here: forkserver failed.'] == "unset IT."
    assert next(line for line in section.lines if "ddp_spawn" in line).endswith(
        "1.5 s" if working else "failed: see below"
    )
