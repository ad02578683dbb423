"""Frames on a stream, and a rank's end of its channel."""

import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankwise.errors import ProcessGroupError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import REQUEST_ID_SIZE, FrameReader, Kind, frame
from rankwise.launchers.context import WorkerContext
from rankwise.ranks import RankInfo
from tests.helpers.own_process import signal_handled
from tests.helpers.raising import raises
from tests.unit.launchers.supervised import LIMIT_S, Ends

MESSAGES = [
    (Kind.HELLO, b""),
    (Kind.FAILURE, b"x" * 70_000),
    (Kind.DONE, b""),
    (Kind.STORE_REPLY, b"\x00\xff"),
]


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 1000, 1 << 20])
def test_frames_survive_any_cutting(chunk: int) -> None:
    """Frames come out whole and in order, in whatever pieces the bytes come in."""
    stream = b"".join(frame(kind, payload) for kind, payload in MESSAGES)
    reader = FrameReader()
    found: list[tuple[Kind, bytes]] = []
    for start in range(0, len(stream), chunk):
        reader.feed(stream[start : start + chunk], lambda *each: found.append(each))
    assert found == MESSAGES


def test_an_incomplete_frame_waits() -> None:
    """Nothing is yielded before the last byte is there."""
    reader = FrameReader()
    data = frame(Kind.STOP, b"reason")
    found: list[tuple[Kind, bytes]] = []
    reader.feed(data[:-1], lambda *each: found.append(each))
    assert found == []
    reader.feed(data[-1:], lambda *each: found.append(each))
    assert found == [(Kind.STOP, b"reason")]


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff\2", b"print\n", b"\0\0\0\1\x63", b"\4\0\0\1\2"])
def test_what_is_no_frame(header: bytes) -> None:
    """A length or a kind that no frame has is an error at once, not when so many bytes have come."""
    raises(ProcessGroupError, r"A channel .* is damaged", FrameReader().feed, header, lambda *_: None)


def test_messages_reach_the_supervisor(ends: Ends) -> None:
    """Frames without and with a payload."""
    ends.channel.send(Kind.HELLO)
    assert ends.receive() == (Kind.HELLO, b"")
    ends.channel.send(Kind.FAILURE, b"record")
    assert ends.receive() == (Kind.FAILURE, b"record")


class Interrupted(Exception):
    """Raised by a signal handler."""


@contextmanager
def interrupted(ends: Ends) -> Iterator[None]:
    """Have a signal handler raise in the main thread, once the block has sent something."""
    is_raised = threading.Event()

    def handle(number: int, frame: object) -> None:
        if not is_raised.is_set():
            is_raised.set()
            raise Interrupted

    main = threading.get_ident()

    def interrupt() -> None:
        select.select([ends.sock], [], [], LIMIT_S)
        while not is_raised.is_set():  # one that comes just before a wait in C is handled only after it
            signal.pthread_kill(main, signal.SIGUSR1)
            is_raised.wait(0.05)

    thread = threading.Thread(target=interrupt)
    with signal_handled(signal.SIGUSR1, handle):
        thread.start()
        try:
            yield
        finally:
            thread.join()


def test_a_signal_does_not_cut_a_frame(ends: Ends) -> None:
    """A handler that raises while a big frame is under way leaves it, and the next one, whole."""
    with pytest.raises(Interrupted), interrupted(ends):
        ends.channel.send(Kind.STORE_REQUEST, bytes(1 << 20))
    later = threading.Thread(target=ends.channel.send, args=(Kind.DONE,))
    later.start()
    assert ends.receive() == (Kind.STORE_REQUEST, bytes(1 << 20))
    assert ends.receive() == (Kind.DONE, b"")
    later.join()


def test_a_report_that_was_interrupted_is_none(ends: Ends) -> None:
    """What a signal handler raises while a failure is being reported is reported too; then nothing is."""
    worker = WorkerContext(RankInfo(0, 0, 0, 1, 1, 1), channel=ends.channel)
    with pytest.raises(Interrupted), interrupted(ends):
        worker.report_failure(ValueError("x" * (1 << 20)))
    report = threading.Thread(target=worker.report_failure, args=(ValueError("second"),))
    report.start()
    texts = [FailureRecord.from_json(ends.receive()[1]).exception_message[:6] for _ in range(2)]
    report.join()
    assert texts == ["x" * 6, "second"]
    worker.report_failure(ValueError("third"))
    ends.channel.send(Kind.DONE)
    assert ends.receive() == (Kind.DONE, b"")


def test_a_question_is_answered(ends: Ends) -> None:
    """The answer to one's own request is waited for, whatever the order of the answers."""
    values: dict[str, bytes] = {}

    def ask(name: str) -> None:
        values[name] = ends.channel.ask_store(name.encode(), LIMIT_S)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
    requests = []
    for thread in threads:
        thread.start()
        requests.append(ends.receive()[1])
    for request in reversed(requests):
        number, question = request[:REQUEST_ID_SIZE], request[REQUEST_ID_SIZE:]
        ends.send(Kind.STORE_REPLY, number + b"answer to " + question)
    for thread in threads:
        thread.join(LIMIT_S)
    assert values == {"one": b"answer to one", "two": b"answer to two"}


def test_no_answer_is_a_timeout(ends: Ends) -> None:
    """A question that nobody answers ends by its timeout; a late answer hurts nobody."""
    raises(TimeoutError, None, ends.channel.ask_store, b"question", 0.05)
    number = ends.receive()[1][:REQUEST_ID_SIZE]
    assert ends.receive() == (Kind.STORE_CANCEL, number)
    ends.send(Kind.STORE_REPLY, number + b"late")
    ends.channel.send(Kind.DONE)
    assert ends.receive() == (Kind.DONE, b"")


def test_stop(ends: Ends) -> None:
    """It ends open questions at once, and later ones; what was asked to be called is called, also later."""
    called, late = threading.Event(), threading.Event()
    ends.channel.call_on_stop(called.set)
    timer = threading.Timer(0.05, lambda: ends.send(Kind.STOP, b"reason"))
    timer.start()
    raises(ConnectionError, None, ends.channel.ask_store, b"question", LIMIT_S)
    raises(ConnectionError, None, ends.channel.ask_store, b"question", LIMIT_S)
    timer.join()
    assert called.wait(LIMIT_S)
    ends.channel.call_on_stop(late.set)
    assert late.wait(LIMIT_S)


def test_a_lost_supervisor_is_noticed(ends: Ends) -> None:
    """End of file calls `on_lost`, ends questions at once, and later ones, and makes sending silent."""
    threading.Timer(0.05, ends.sock.close).start()
    raises(ConnectionError, None, ends.channel.ask_store, b"question", LIMIT_S)
    assert ends.lost.wait(LIMIT_S)
    with pytest.raises(ConnectionError):
        ends.channel.ask_store(b"question", 1e6)  # whose own limit would not end before this test's
    ends.channel.send(Kind.DONE)


def test_closing_is_no_loss() -> None:
    """A channel that is closed from this side does not call `on_lost`, and ends its thread."""
    ends = Ends()
    ends.channel.close()
    ends.sock.close()
    assert not ends.lost.is_set()
    assert "rankwise-channel" not in {thread.name for thread in threading.enumerate()}


def test_what_is_too_long_for_a_frame_is_refused(ends: Ends) -> None:
    """The rank that sends it gets the error; later messages come."""
    with pytest.raises(ProcessGroupError, match=r"STORE_REQUEST message of \d+ bytes is longer than"):
        ends.channel.send(Kind.STORE_REQUEST, bytes((1 << 26) + 1))
    ends.channel.send(Kind.DONE)
    assert ends.receive() == (Kind.DONE, b"")


def test_a_damaged_channel_is_lost(ends: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    """Requests end at once, and the reason is shown."""
    threading.Timer(0.05, ends.sock.sendall, [b"text"[:4] + b"!"]).start()
    raises(ConnectionError, None, ends.channel.ask_store, b"question", LIMIT_S)
    assert ends.lost.wait(LIMIT_S)
    assert "is damaged" in capfd.readouterr().err
