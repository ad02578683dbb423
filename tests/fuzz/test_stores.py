"""Damaged values in the store of a job: identities, restarts, failures, statuses, heartbeats, messages."""

import dataclasses
import json
import logging
import os
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.failures.exchange import FailureExchange, StatusReport, report_key, resolve_cause
from rankwise.failures.record import FailureRecord, first_cause
from rankwise.launchers.elastic import _Job
from rankwise.launchers.worker_main import JobSpec
from rankwise.monitoring.heartbeat import HeartbeatReader, MonitoredRank
from rankwise.monitoring.rank_monitor import ChannelMonitor
from rankwise.monitoring.stragglers import LocalStragglerMonitor, StragglerMonitor, TeardownTimeout
from rankwise.process_group.lone_calls import _DONE, _wait_for_outcome
from rankwise.processes.exit_codes import exit_code_of
from rankwise.processes.memory_file import Descriptor, create_memory_file
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity, RemoteFailure, agree_on_restart, run_rendezvous
from rankwise.stores.values import read_value
from tests.fuzz.inputs import Fuzzing, damaged, damaged_json

TIMEOUT = timedelta(milliseconds=3)
IDENTITIES = [RankIdentity(rank, rank, 0, 2, "host", 7 + rank) for rank in range(2)]
RANKS = RankInfo(0, 0, 0, 2, 2, 1)
RECORD = FailureRecord.of_exception(RANKS, TimeoutError("Waited 5 s for x"))


def store_with(**values: bytes) -> Any:
    """Return a store with these values; `__` in a name stands for `/`."""
    store: Any = dist.HashStore()
    for name, value in values.items():
        store.set(name.replace("__", "/"), value)
    return store


def test_rendezvous(fuzzing: Fuzzing) -> None:
    """The first rank reads all identities, and the last one each; they are of all ranks, or an error."""

    def parse(random: Random) -> None:
        plain = [dataclasses.asdict(each) for each in IDENTITIES]
        if random.random() < 0.5:
            store = store_with(met=damaged_json(random, ["", plain]))
        else:
            store = store_with(arrived=b"1", identity__1=damaged_json(random, plain[1]))
        found = run_rendezvous(store, IDENTITIES[0], TIMEOUT)
        assert [each.global_rank for each in found] == [0, 1]

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_restarts(fuzzing: Fuzzing) -> None:
    """A rank comes to a number for its restart, or to an error, also where the counts are huge."""

    def parse(random: Random) -> None:
        store = store_with(
            rankwise__start=damaged(random, b"1"),
            rankwise__start1__arrived=str(random.choice((0, 1, 5, 1 << 60, -(1 << 60)))).encode(),
            rankwise__start1__complete=damaged(random, b"1"),
            rankwise__start1__identity__0=damaged_json(random, dataclasses.asdict(IDENTITIES[0])),
            rankwise__job=damaged(random, b"0123"),
        )
        agreed = agree_on_restart(store, RankInfo(1, 1, 0, 2, 2, 1), TIMEOUT)
        assert isinstance(agreed.number, int)

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_values(fuzzing: Fuzzing) -> None:
    """What is read from a key has the type that was asked for."""
    kinds: list[tuple[Any, Any]] = [
        *((int, 5), (tuple[bool, str], [True, "text"])),
        *((dict[str, str], {"a": "b"}), (list[str], ["a", "b"])),
        (tuple[str, int, int, str], ["host", 29400, 1, "job"]),
    ]

    def parse(random: Random) -> None:
        kind, value = random.choice(kinds)
        found = read_value(store_with(key=damaged_json(random, value)), "key", kind)
        assert isinstance(found, getattr(kind, "__origin__", kind))
        json.dumps(found)

    assert 0 < fuzzing.run(parse) < fuzzing.count


@pytest.fixture
def _quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
def test_failures(fuzzing: Fuzzing) -> None:
    """A record in the store becomes an error with a text and an exit code; so does a damaged one."""

    def parse(random: Random) -> None:
        text = damaged_json(random, json.loads(RECORD.to_json()))
        store = store_with(failure=text, status__1=damaged_json(random, [True, "line"]))
        exchange = FailureExchange(store, IDENTITIES, IDENTITIES[0])
        error, record = resolve_cause(RemoteFailure(text), RANKS, exchange)
        assert 0 < exit_code_of(error) < 256
        assert record.line()
        assert first_cause([record, RECORD]) in (record, RECORD)
        FailureRecord.from_json(record.to_json())
        store.set(report_key("late"), damaged_json(random, [[True, "line"]] * len(IDENTITIES)))
        replies = exchange._collected(report_key("late")) or [None] * len(IDENTITIES)
        report = exchange._status_report(exchange._replies(replies))
        assert isinstance(report, StatusReport)
        raise error

    assert fuzzing.run(parse) == 0


def test_records_of_restarted_ranks(fuzzing: Fuzzing) -> None:
    """A record that a rank was writing when it was killed is left out."""
    file = create_memory_file()
    job = _Job(JobSpec(print, "fork"), [], [Descriptor(file)], Descriptor(-1), is_alone=True, key=b"")

    def parse(random: Random) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, damaged_json(random, json.loads(RECORD.to_json())), 0)
        for record in job.records():
            str(record.to_error(0.0, (), ()))

    try:
        assert fuzzing.run(parse) == fuzzing.count
    finally:
        os.close(file)


def test_heartbeats_in_the_store(fuzzing: Fuzzing, capfd: pytest.CaptureFixture[str]) -> None:
    """A damaged heartbeat is left out; the thread that reads it goes on."""

    def parse(random: Random) -> None:
        monitor = StragglerMonitor(IDENTITIES, IDENTITIES[0], warn_after_s=0.1)
        beats = [damaged_json(random, [3, 17, 0.5, random.random() < 0.5, "forward"]) for _ in IDENTITIES]
        monitor.look(store_with(heartbeat__0=beats[0], heartbeat__1=beats[1]))

    assert fuzzing.run(parse) == fuzzing.count
    capfd.readouterr()


def test_messages(fuzzing: Fuzzing) -> None:
    """A message of any bytes is delivered to those who subscribe to its kind, if there are any."""

    def parse(random: Random) -> None:
        texts: list[str] = []
        monitor = ChannelMonitor(0, store_with(), "job", lambda request, on_reply: None)
        monitor.subscribe("stop", texts.append)
        monitor._on_message(damaged(random, b"stop:text"))
        assert all(isinstance(text, str) for text in texts)

    assert fuzzing.run(parse) == fuzzing.count


def test_outcome_of_rank_zero(fuzzing: Fuzzing) -> None:
    """Whatever rank zero has left behind, the block runs or an error says why not."""

    def parse(random: Random) -> None:
        outcome = random.choice((_DONE.encode(), b"0 ValueError: text"))
        _wait_for_outcome(store_with(key=damaged(random, outcome)), "key", TIMEOUT)

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_heartbeat_pages(fuzzing: Fuzzing, capfd: pytest.CaptureFixture[str]) -> None:
    """A page of shared memory with any bytes is a heartbeat."""
    file = create_memory_file()
    reader = HeartbeatReader(file)
    workers = [MonitoredRank(RANKS, None, reader)]
    stragglers = LocalStragglerMonitor(workers, warn_after_s=0.1)
    teardown = TeardownTimeout(workers, 9.0, lambda rank, error: None)

    def parse(random: Random) -> None:
        os.pwrite(file, random.randbytes(80), 0)
        assert reader.is_saving() in (True, False)
        assert workers[0].status()
        assert json.dumps(dataclasses.asdict(reader.read()))
        stragglers.look()
        teardown.look()

    assert fuzzing.run(parse) == fuzzing.count
    reader.close()
    os.close(file)
    capfd.readouterr()
