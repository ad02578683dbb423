"""What a supervisor makes of channels that are lost or damaged, and of requests to the private store."""

import os
import socket

import pytest

from rankwise.errors import WorkerRaisedError
from rankwise.launchers.channel import REQUEST_ID_SIZE, Kind, frame
from tests.unit.launchers.supervised import NEVER_S, OVER, STOP, Supervise


def test_a_channel_that_is_lost_while_the_process_runs(supervise: Supervise) -> None:
    """The rank can report no more: that is its failure, and its process is ended."""
    job = supervise(pid=os.getpid()).begin()
    job[0].received()
    job[1].sock.close()
    assert job[0].receive() == STOP
    error = job.failure_of(WorkerRaisedError)
    assert (error.global_rank, error.exception_type) == (1, "BrokenChannel")
    assert "its process runs, but its channel is closed" in error.exception_message


@pytest.mark.parametrize("how", ["done", "failed", "stopped", "told to stop"])
def test_a_channel_that_is_no_longer_needed(supervise: Supervise, how: str) -> None:
    """A rank that has reported how it ended, or is to end, may close its channel."""
    job = supervise(pid=os.getpid(), grace_period_s=NEVER_S).begin()
    if how == "done":
        job[1].send(Kind.DONE)
    elif how == "failed":
        job[1].lose_peer()
    elif how == "stopped":
        job[1].send(Kind.STOPPED, b"15")
    else:
        job[0].fail()
        assert job[1].receive() == STOP
    job[1].sock.close()
    job[0].received()
    assert job[1].theirs not in job.supervisor._loop._selector.get_map()
    failures = [record.exception_type for record in job.reported if record.global_rank == 1]
    assert failures in ([], ["RuntimeError"])


def test_a_channel_that_was_lost_between_two_jobs(supervise: Supervise) -> None:
    """The rank cannot take part in the next job, which fails when it begins."""
    job = supervise(here=True, pid=os.getpid()).begin(until_exit=False)
    job.succeed()
    job[1].sock.close()
    assert job[0].received() == []
    job.supervisor.begin_job(until_exit=False)
    assert job[0].receive() == STOP
    job[0].send(Kind.DONE)
    assert "its channel is closed" in str(job.failure())


def test_a_channel_that_is_lost_as_the_process_ends(supervise: Supervise) -> None:
    """A process whose memory is gone is reported with its exit status, not with its channel."""
    job = supervise().begin()
    job[1].sock.close()
    assert job[0].received() == []
    job[1].process.end(3)
    assert job.failure().what() == "exited with code 3 before it had finished"


def test_a_channel_that_is_reset_is_lost(supervise: Supervise) -> None:
    """A rank has closed it with frames unread, as when it is killed."""
    job = supervise(pid=os.getpid()).begin()
    job.supervisor.release()
    assert job[0].receive() == OVER
    job[1].received()
    job.supervisor.release()
    assert job[0].receive() == OVER
    job[0].received()
    job[1].sock.close()
    assert "its channel is closed" in str(job.failure())


def test_rank_zero_here_that_gives_up_ends_the_job(supervise: Supervise) -> None:
    """It closes its channel, as after an error in the launching process: the others are stopped."""
    job = supervise(here=True).begin()
    job[0].sock.close()
    assert job[1].receive() == STOP
    job[1].exit()
    job.supervisor.wait_job()
    assert job.supervisor.error() is None


@pytest.mark.parametrize(
    "data",
    [
        b"print\n",
        frame(Kind.FAILURE, b"null"),
        frame(Kind.ELSEWHERE, b"{"),
        frame(Kind.EXITED, b"[]"),
        frame(Kind.STOPPED, b"99"),
        frame(Kind.STORE_REQUEST, bytes(REQUEST_ID_SIZE) + b"text"),
    ],
    ids=["no frame", "FAILURE", "ELSEWHERE", "EXITED", "STOPPED", "STORE_REQUEST"],
)
def test_what_is_no_message_fails_the_rank(supervise: Supervise, data: bytes) -> None:
    """Of any frame; nothing that follows is read, and the job ends with its processes."""
    job = supervise().begin()
    job[1].sock.sendall(data + frame(Kind.DONE))
    assert job[0].receive() == STOP
    job[1].fail("KeyError")
    error = job.failure_of(WorkerRaisedError)
    assert (error.global_rank, error.exception_type) == (1, "BrokenChannel")
    assert (error.stopped, error.consequences) == ((0,), ())
    assert "what it sent is no message: " in error.exception_message


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_message_of_rank_zero_here(supervise: Supervise, is_first: bool) -> None:
    """Nothing more comes of it, so it counts as a rank that has left; also after another failure."""
    job = supervise(here=True).begin()
    if not is_first:
        job[1].exit(3)
        assert not job.is_over()
    job[0].sock.sendall(b"print\n")
    assert ("what it sent is no message: " in job.failure().summary()) == is_first


def reply(value: bytes, number: int = 1) -> tuple[Kind, bytes]:
    return Kind.STORE_REPLY, number.to_bytes(REQUEST_ID_SIZE, "big") + value


def test_store_requests_are_replied_to(supervise: Supervise) -> None:
    """At once, or when another rank has set the key; each with its own number."""
    job = supervise().begin()
    job[0].request(b"get", b"key", number=7)
    assert job[0].received() == []
    job[1].request(b"set", b"key", b"value", number=8)
    assert job[1].receive() == reply(b"", 8)
    assert job[0].receive() == reply(b"value", 7)


def test_a_request_that_was_cancelled_gets_no_reply(supervise: Supervise) -> None:
    """Only that one: another rank's of the same number is another request."""
    job = supervise(3).begin()
    for rank in (0, 1):
        job[rank].request(b"get", b"key", number=7)
    job[0].send(Kind.STORE_CANCEL, (7).to_bytes(REQUEST_ID_SIZE, "big"))
    assert job[0].received() == job[1].received() == []
    job[2].request(b"set", b"key", b"value")
    assert job[1].receive() == reply(b"value", 7)
    assert job[0].received() == []


def test_a_rank_that_does_not_read_blocks_nobody(supervise: Supervise) -> None:
    """What its channel does not take is sent when it reads again, whole and in order."""
    job = supervise().begin()
    value = bytes(range(256)) * 1000
    job[1].request(b"set", b"key", value)
    for number in range(9):
        job[0].request(b"get", b"key", number=number)
    assert job[1].received() == [reply(b"")]
    assert [job[0].receive() for _ in range(9)] == [reply(value, number) for number in range(9)]
    job[0].request(b"count", number=10)
    assert job[0].receive() == reply(b"1", 10)


def test_a_rank_that_takes_no_frames_may_send_some(supervise: Supervise) -> None:
    """Sending to it fails, which is no failure of the rank; what it sends counts."""
    job = supervise().begin(until_exit=False)
    job[1].sock.shutdown(socket.SHUT_RD)
    job.supervisor.release()
    assert job[0].received() == [OVER]
    assert job.supervisor._workers[1].outgoing == b""
    job.succeed()


def test_a_rank_that_is_gone_is_sent_nothing(supervise: Supervise) -> None:
    """Nothing is written to its channel, which the supervisor no longer watches."""
    job = supervise().begin(until_exit=False)
    job.send_all(Kind.DONE)
    job[1].exit()
    assert job.is_over()
    job.supervisor.release()
    assert job[0].receive() == OVER
    job.supervisor.wait_job()
