"""How a supervisor ends its ranks: STOP, the grace period, SIGKILL; and what it waits for meanwhile."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from rankwise.errors import WorkerTimedOutError
from rankwise.failures.record import FailureRecord
from rankwise.launchers import supervisor
from rankwise.launchers.channel import Kind
from rankwise.monitoring.heartbeat import TEARDOWN, heartbeat_written_to, report_phase, report_saving
from rankwise.processes.signals import ROUTER
from tests.helpers.own_process import wait_until
from tests.helpers.raising import raises
from tests.unit.launchers.supervised import NEVER_S, SHORT_S, STOP, Job, Supervise, wait_until_handled

# -------------------------------------------------------------------------------------- STOP, then SIGKILL


def test_ranks_may_leave_in_the_grace_period(supervise: Supervise) -> None:
    """Nobody is killed before its end; a rank that has left is not killed at all."""
    job = supervise(grace_period_s=NEVER_S).begin()
    job[0].fail()
    assert job[1].received() == [STOP]
    job[0].exit(1)
    job[1].exit()
    assert job.failure().global_rank == 0
    assert job.was_killed() == [False, False]


def test_ranks_that_stay_are_killed(supervise: Supervise) -> None:
    """After the grace period, also the one that has failed."""
    job = supervise(3).begin()
    job[0].fail()
    assert job[2].receive() == STOP
    assert job.failure().global_rank == 0
    assert job.was_killed() == [True] * 3


@pytest.fixture
def suspended() -> Iterator[int]:
    """Return the id of a process that is stopped, and reacts to SIGKILL only."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
        process.kill()


def test_a_suspended_process_is_killed_at_once(supervise: Supervise, suspended: int) -> None:
    """It would not react to STOP, so the grace period is no use."""
    job = supervise(here=True, pid=suspended, grace_period_s=NEVER_S).begin()
    job[0].fail()
    job[0].send(Kind.LEFT)
    assert job.failure().global_rank == 0
    assert job[1].process.was_killed


def test_end_all_stops_and_waits(supervise: Supervise) -> None:
    """Ranks that were not supervised yet, or have ended their last job, are ended; there is no failure."""
    job = supervise()
    job.supervisor.end_all()
    assert [job[0].receive(), job[1].receive()] == [STOP, STOP]
    assert job[0].process.was_killed
    assert job.supervisor.all_ended()
    job.supervisor.wait_job()
    assert job.supervisor.error() is None
    job = supervise().begin(until_exit=False)
    job.succeed()
    job.supervisor.end_all()
    assert job.supervisor.all_ended()


def test_end_all_by_a_signal(supervise: Supervise) -> None:
    """A thread that waits for the job then gets what the signal means; a later end does not hide that."""
    job = supervise().begin()
    job.supervisor.end_all(by=signal.SIGTERM)
    job.supervisor.end_all()
    with pytest.raises(SystemExit) as ended:
        job.supervisor.wait_job()
    assert ended.value.code == 143


def test_ctrl_c_while_ranks_are_ended(supervise: Supervise) -> None:
    """The rest of the grace period is left out."""
    job = supervise(grace_period_s=NEVER_S).begin()

    def interrupt() -> None:
        assert job[1].receive() == STOP
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    job.supervisor.end_all()
    assert job.supervisor.all_ended()
    thread.join()
    assert job[1].process.was_killed


def test_closing_again_does_nothing(supervise: Supervise) -> None:
    """The thread has ended, and all descriptors are closed."""
    job = supervise().begin()
    job.supervisor.end_all()
    for _ in range(2):
        job.supervisor.close()
    assert not job.supervisor._thread.is_alive()
    for rank in (job[0], job[1]):
        assert (rank.theirs.fileno(), rank.process.fileno()) == (-1, -1)
        raises(ValueError, "closed", rank.reader.read)


# -------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_waited_for(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others are killed after the grace period; this is told once; then the rank is killed too."""
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", SHORT_S)
    job = supervise(3, teardown_timeout_s=NEVER_S)
    with heartbeat_written_to(job[1].heartbeat):
        report_saving(True)
        job.begin()
        job[0].fail()
        wait_until(lambda: job[2].process.was_killed)
        threading.Event().wait(3 * SHORT_S)
        assert job.was_killed() == [True, False, True]
        report_saving(False)
        assert job.failure().global_rank == 0
    assert job[1].process.was_killed
    notice = "rankwise: the job ends when global_rank=1 has written its checkpoint.\n"
    assert capfd.readouterr().err == notice


def test_a_checkpoint_that_takes_too_long(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the time of a teardown, from STOP on."""
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", SHORT_S)
    job = supervise(teardown_timeout_s=4 * SHORT_S)
    with heartbeat_written_to(job[1].heartbeat):
        report_saving(True)
        job.begin()
        job[0].fail()
        assert job.failure().global_rank == 0
    assert job[1].process.was_killed


def test_a_rank_that_ended_while_it_saved(supervise: Supervise, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody waits for its checkpoint, whatever its heartbeat says."""
    job = supervise(3)
    with heartbeat_written_to(job[1].heartbeat):
        report_saving(True)
        job.begin()
        job[1].exit(3)
        assert job.failure().global_rank == 1
    assert capfd.readouterr().err == ""


def test_a_second_signal_does_not_wait_for_a_checkpoint(supervise: Supervise) -> None:
    """SIGKILL is sent to all at once."""
    job = supervise(grace_period_s=NEVER_S)
    with heartbeat_written_to(job[1].heartbeat), pytest.raises(SystemExit), job.supervisor.handle_signals():
        report_saving(True)
        job.begin()
        job[0].fail()
        assert job[1].receive() == STOP
        signal.raise_signal(signal.SIGTERM)
        job.supervisor.wait_job()
    assert job[1].process.was_killed


# -------------------------------------------------------------------------------------- time limits


def test_a_teardown_that_hangs(supervise: Supervise, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that waits for it has timed out; the one that hangs is missing; stacks of all are written."""
    job = supervise(here=True, pid=os.getpid(), teardown_timeout_s=4 * SHORT_S)
    with heartbeat_written_to(job[1].heartbeat):
        report_phase(TEARDOWN)
        job.begin()
        assert job[1].receive() == STOP
        job[0].send(Kind.LEFT)
        error = job.failure_of(WorkerTimedOutError)
    assert (error.global_rank, error.missing) == (0, (1,))
    assert error.exception_type == "RendezvousTimeoutError"
    assert "a rank waited too long; stacks of global_rank=0" in capfd.readouterr().err


def test_a_teardown_without_a_limit(supervise: Supervise) -> None:
    """Nothing looks at it."""
    job = supervise()
    with heartbeat_written_to(job[1].heartbeat):
        report_phase(TEARDOWN)
        job.begin()
        assert job[1].received() == []
        assert job.supervisor._loop._timers[1:] == []


@pytest.mark.parametrize("is_first", [True, False])
def test_stacks_after_a_time_out(
    supervise: Supervise, capfd: pytest.CaptureFixture[str], is_first: bool
) -> None:
    """They are written while the ranks still hang, not when they have been told to end."""
    job = supervise(3, here=True, pid=os.getpid(), grace_period_s=NEVER_S).begin()
    if not is_first:
        job[1].fail()
        assert job[2].receive() == STOP
    job[2].fail("RuntimeError", "Timed out waiting 1000ms for", is_timeout=True)
    job[0].received()
    text = capfd.readouterr().err
    assert ("a rank waited too long; stacks of global_rank=0" in text) == is_first


# -------------------------------------------------------------------------------------- rank 0 here


@pytest.fixture(autouse=True)
def short_time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TO_LEAVE_S", SHORT_S)


def wait_until_left(job: Job) -> None:
    """Wait until rank 1 has been killed, and rank 0 has had its time to leave."""
    wait_until(lambda: job[1].process.was_killed)
    wait_until_handled(job.supervisor)  # the end of the grace period, which sets the time to leave
    wait_until(lambda: not job.supervisor._loop.has_deadline)
    wait_until_handled(job.supervisor)


def fail(job: Job) -> None:
    job[0].fail("ValueError", "loss is nan")


def be_killed(job: Job) -> None:
    job[2].exit(-signal.SIGKILL)


def end_by_sigterm(job: Job) -> None:
    with pytest.raises(SystemExit), job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (fail, 1, "raised ValueError: loss is nan"),
        (be_killed, 137, "global_rank=2 (local_rank=2"),
        (end_by_sigterm, 143, ""),
    ],
)
def test_rank_zero_here_that_does_not_leave(
    supervise: Supervise,
    exits: list[int],
    capfd: pytest.CaptureFixture[str],
    end: Callable[[Job], None],
    code: int,
    text: str,
) -> None:
    """This process ends a while after the others, with the exit code of what has ended the job."""
    job = supervise(3, here=True).begin()
    end(job)
    wait_until_left(job)
    assert exits == [code]
    written = capfd.readouterr().err
    assert text in written
    assert ("(rank 0 was still at work, so its process ends)" in written) == bool(text)


def test_a_program_that_outlives_errors_goes_on(
    supervise: Supervise, exits: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook's kernel is not ended for a rank 0 that is busy; the error is shown."""
    monkeypatch.setattr(supervisor, "is_hosted", lambda: True)
    job = supervise(here=True).begin()
    fail(job)
    wait_until_left(job)
    assert exits == []
    assert "(rank 0 raises this when it can)" in capfd.readouterr().err


def test_rank_zero_here_that_has_left_is_left_alone(
    supervise: Supervise, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the kernel needs time to end another rank; without a rank here nothing is written."""
    for here in (True, False):
        job = supervise(here=here)
        job[1].process.is_killable = False
        job.begin()
        fail(job)
        job[0].send(Kind.LEFT)
        wait_until_left(job)
        assert ("(rank 0 raises this when it can)" in capfd.readouterr().err) == here
    assert exits == []


def test_what_follows_from_the_end_of_a_job_is_not_shown(
    supervise: Supervise, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that fails because the program ends its job does not decide on an exit code."""
    job = supervise(here=True).begin()
    with pytest.raises(KeyboardInterrupt), job.supervisor.handle_signals():
        raises(KeyboardInterrupt, None, signal.raise_signal, signal.SIGINT)
        assert job[1].receive() == STOP
    job[1].fail()
    wait_until_left(job)
    assert exits == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_noticed", [False, True])
def test_ctrl_c_that_rank_zero_here_does_not_notice(
    supervise: Supervise, exits: list[int], is_noticed: bool
) -> None:
    """Its process ends where training was asked to stop, and was interrupted again, in a call in C."""
    job = supervise(here=True).begin()
    job[1].send(Kind.IN_LOOP, b"1")
    job[1].received()
    with pytest.raises(KeyboardInterrupt), job.supervisor.handle_signals():
        for _ in range(2):
            raises(KeyboardInterrupt, None, signal.raise_signal, signal.SIGINT)
            job[0].received()
        if is_noticed:
            ROUTER.deliver()
        wait_until_left(job)
    assert exits == ([] if is_noticed else [130])


# -------------------------------------------------------------------------------------- its own defects


def test_a_defect_of_the_supervisor_ends_the_job(supervise: Supervise) -> None:
    """Its thread has ended: the ranks are killed, and `wait_job` and `end_all` do not wait for it."""
    job = supervise(3, grace_period_s=NEVER_S).begin()
    defect = OSError("no such child")
    job[1].process.wait_error = defect
    job[2].send(Kind.DONE)
    job[2].exit()
    wait_until_handled(job.supervisor)
    job[1].exit()
    with pytest.raises(RuntimeError, match="a defect of rankwise") as raised:
        job.supervisor.wait_job()
    assert raised.value.__cause__ is defect
    assert job.was_killed() == [True, True, False]
    assert job[0].process.is_reaped
    job.supervisor.end_all()


def test_a_defect_does_not_hide_a_failure(supervise: Supervise) -> None:
    """The error is the rank's, and has the defect as its cause."""
    defect = OSError("the network is down")

    def report(record: FailureRecord) -> None:
        raise defect

    job = supervise(on_failure=report).begin()
    job[1].exit(3)
    error = job.failure()
    assert error.what() == "exited with code 3 before it had finished"
    assert error.__cause__ is defect
