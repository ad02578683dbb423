"""Damaged frames at both ends of a channel, and damaged requests and replies of the private store."""

import dataclasses
import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from random import Random

from rankwise.errors import WorkerError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import FrameReader, Kind, RankChannel, frame
from rankwise.launchers.supervisor import SupervisionOptions, Supervisor
from rankwise.monitoring.heartbeat import Heartbeat, HeartbeatReader
from rankwise.processes.exit_codes import exit_code_of
from rankwise.processes.memory_file import create_memory_file
from rankwise.ranks import RankInfo
from rankwise.stores.private import PrivateStore, StoreTable, pack_fields
from tests.fuzz.inputs import Fuzzing, damaged, damaged_json

RANKS = RankInfo(0, 0, 0, 2, 2, 1)
RECORD = dataclasses.asdict(FailureRecord.of_exception(RANKS, ValueError("the loss is nan")))
RECORD["heartbeat"] = dataclasses.asdict(Heartbeat(5, 3.0, waits=True, phase="forward"))
REQUESTS = [
    pack_fields(text.encode().split(b" "))
    for text in (
        *("set key value", "add number 5", "check key number", "compare_set key  new", "delete key"),
        *("count", "wait key other", "get key"),
    )
]
OPTIONS = SupervisionOptions(grace_period_s=1.0, init_timeout=timedelta(seconds=9))
LIMIT_S = 60  # nothing here takes so long, unless it hangs


def frames_of_a_rank(random: Random) -> bytes:
    """Return what a rank sends, before it is damaged as a whole; payloads are damaged already."""
    record = damaged_json(random, RECORD)
    request = bytes(7) + b"\x01" + damaged(random, random.choice(REQUESTS))
    messages = [
        *((Kind.HELLO, b""), (Kind.IN_LOOP, b"1"), (Kind.DONE, b""), (Kind.STORE_CANCEL, bytes(8))),
        (Kind.STOPPED, damaged(random, b"15")),
        *((kind, record) for kind in (Kind.FAILURE, Kind.ELSEWHERE, Kind.EXITED)),
        *((Kind.STORE_REQUEST, payload) for payload in (request, request[:9], b"")),
    ]
    return b"".join(frame(*message) for message in random.choices(messages, k=3))


def frames_of_a_supervisor(random: Random) -> bytes:
    """Return what a supervisor sends, in the same way."""
    replies = [frame(Kind.STORE_REPLY, bytes(7) + bytes([number]) + b"value") for number in range(3)]
    request = frame(Kind.REQUEST, damaged(random, b"15"))
    return b"".join(random.choices([*replies, request, frame(Kind.OVER), frame(Kind.STOP)], k=3))


def send_all(sock: socket.socket, stream: bytes) -> None:
    """Send as much as the other end takes; then close the socket."""
    with suppress(OSError), sock:
        sock.sendall(stream)


def test_frames(fuzzing: Fuzzing) -> None:
    """Whole frames of known kinds come out of a stream, or our error, however it is cut."""

    def parse(random: Random) -> None:
        stream = damaged(random, frames_of_a_rank(random))
        cuts = sorted(random.randrange(len(stream) + 1) for _ in range(random.randrange(4)))
        reader = FrameReader()

        def check(kind: object, payload: object) -> None:
            assert isinstance(kind, Kind)
            assert isinstance(payload, bytes)

        for start, end in pairwise((0, *cuts, len(stream))):
            reader.feed(stream[start:end], check)

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_what_a_rank_sends(fuzzing: Fuzzing) -> None:
    """The supervisor ends the job, by the error of the rank where the job has not stopped."""

    def parse(random: Random) -> None:
        stream = frames_of_a_rank(random)
        stream = stream if random.random() < 0.4 else damaged(random, stream)
        ours, theirs = socket.socketpair()
        heartbeat = create_memory_file()
        supervisor = Supervisor(OPTIONS)
        supervisor.add(RANKS, ours, None, HeartbeatReader(heartbeat))
        supervisor.start()
        supervisor.begin_job(until_exit=False)
        sending = threading.Thread(target=send_all, args=(theirs, stream))
        sending.start()
        try:
            supervisor.wait_job()
        except (SystemExit, WorkerError) as error:
            code = error.code if isinstance(error, SystemExit) else exit_code_of(error)
            assert code in range(1, 256)
        finally:
            supervisor.close()
            sending.join()
            os.close(heartbeat)

    assert fuzzing.run(parse) == fuzzing.count


def test_what_a_supervisor_sends(fuzzing: Fuzzing) -> None:
    """The rank gets replies, or notices that its channel is lost; no request waits for ever."""

    def parse(random: Random) -> None:
        stream = damaged(random, frames_of_a_supervisor(random))
        ours, theirs = socket.socketpair()
        lost, replied = threading.Event(), threading.Event()
        channel = RankChannel(theirs, on_lost=lost.set)
        try:
            channel.call_on_request(lambda number: None)
            channel.post_store(REQUESTS[0], lambda reply: replied.set())
            send_all(ours, stream)
            assert lost.wait(LIMIT_S)
            assert replied.wait(LIMIT_S)
        finally:
            channel.close()
            ours.close()

    assert fuzzing.run(parse) == fuzzing.count


def test_requests(fuzzing: Fuzzing) -> None:
    """The table of the private store replies to a request or refuses it, and goes on."""
    table = StoreTable()

    def parse(random: Random) -> None:
        try:
            table.handle(damaged(random, random.choice(REQUESTS)), lambda reply: None, "name")
        finally:
            table.handle(pack_fields([b"count"]), lambda reply: None)

    assert 0 < fuzzing.run(parse, ValueError) < fuzzing.count  # reported by the supervisor as the rank's


def test_replies(fuzzing: Fuzzing) -> None:
    """A rank takes any reply of the table for a value, or refuses it."""

    def parse(random: Random) -> None:
        reply = damaged(random, random.choice((b"1", b"0", b"-17", b"value")))
        store = PrivateStore(lambda request, limit_s: reply, timedelta(seconds=1))
        assert store.get("key") == reply
        assert isinstance(store.check(["key"]), bool)
        assert isinstance(store.num_keys() if random.random() < 0.5 else store.add("key", 1), int)

    assert 0 < fuzzing.run(parse, ValueError) < fuzzing.count  # documented for what is no number
