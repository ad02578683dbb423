"""What a supervisor makes of the frames and the ends of its ranks, which are sockets and stand-ins here."""

import re
import signal
import threading
import time
from functools import partial

import pytest

from rankwise.errors import WorkerExitedError, WorkerKilledError, WorkerRaisedError
from rankwise.launchers import supervisor
from rankwise.launchers.channel import Kind
from rankwise.monitoring import stragglers
from rankwise.processes.signals import StoppedBySignal
from tests.helpers.own_process import wait_until
from tests.unit.launchers.supervised import GONE, LIMIT_S, LOST_PEER, NEVER_S, OVER, SHORT_S, STOP, Supervise

# -------------------------------------------------------------------------------------- the end of a job


def test_a_job_is_over_when_all_are_done(supervise: Supervise) -> None:
    """Not before the last one, and nobody is told to stop; no exit is awaited. `release` tells all ranks."""
    job = supervise().begin(until_exit=False)
    assert not job.is_over()
    job[0].send(Kind.DONE)
    assert not job.is_over()
    job[1].send(Kind.DONE)
    job.supervisor.wait_job()
    assert [job[0].received(), job[1].received()] == [[], []]
    job.supervisor.release()
    assert [job[0].receive(), job[1].receive()] == [OVER, OVER]


def test_a_job_until_exit_is_over_with_the_last_process(supervise: Supervise) -> None:
    """Ranks that are done may take their time to leave; one in the launching process does not leave."""
    job = supervise(3, here=True).begin(until_exit=True)
    job.send_all(Kind.DONE)
    job[1].exit()
    assert not job.is_over()
    assert not job.supervisor.all_ended()
    job[2].exit()
    job.supervisor.wait_job()
    assert job.supervisor.all_ended()


def test_a_rank_may_be_a_job_ahead(supervise: Supervise) -> None:
    """What it has done counts for the next job, also if its process has ended by then."""
    job = supervise().begin(until_exit=False)
    job[1].send(Kind.DONE)
    job[1].send(Kind.DONE)
    job[1].exit()
    job[0].send(Kind.DONE)
    job.supervisor.wait_job()
    job.supervisor.begin_job(until_exit=False)
    assert not job.is_over()
    job[0].send(Kind.DONE)
    job.supervisor.wait_job()


@pytest.mark.parametrize(
    ("exit_code", "phase"), [(0, "before the next job began"), (3, "after it had finished its part")]
)
def test_a_rank_that_exits_between_two_jobs_fails_the_next(
    supervise: Supervise, exit_code: int, phase: str
) -> None:
    """Exit code 0 is no failure of the first job; a failure of it is raised, and not reported again."""
    job = supervise().begin(until_exit=False)
    job.send_all(Kind.DONE)
    job[1].exit(exit_code)
    wait_until(lambda: exit_code == 0 or job[0].process.was_killed)
    assert job.is_over()
    if exit_code == 0:
        job.supervisor.wait_job()
    job.supervisor.begin_job(until_exit=False)
    error = job.failure_of(WorkerExitedError)
    assert (error.global_rank, error.exit_code, error.phase) == (1, exit_code, phase)
    assert (error.consequences, len(job.reported)) == ((), 1)


def test_ranks_that_were_stopped_by_a_signal(supervise: Supervise) -> None:
    """All have stopped or were done: `wait_job` raises what the signal means, whatever their exit codes."""
    job = supervise().begin()
    job[0].send(Kind.STOPPED, b"15")
    job[0].exit(143)
    assert not job.is_over()
    job[1].send(Kind.DONE)
    job[1].exit()
    with pytest.raises(StoppedBySignal) as stopped:
        job.supervisor.wait_job()
    assert isinstance(stopped.value, SystemExit)
    assert (stopped.value.signal_number, stopped.value.code) == (15, 143)


def test_ranks_of_a_script_that_were_stopped(supervise: Supervise) -> None:
    """Their processes go on: the job is over with the last report."""
    job = supervise().begin(until_exit=False)
    job.send_all(Kind.STOPPED, b"2")
    with pytest.raises(KeyboardInterrupt):
        job.supervisor.wait_job()


def test_begin_exit_waits_for_all_processes(supervise: Supervise) -> None:
    """Also for those that have ended before, which is no failure; then there is nothing to wait for."""
    job = supervise(3).begin(until_exit=False)
    job.succeed()
    job[1].exit()
    assert job.is_over()
    job.supervisor.begin_exit()
    job[2].exit()
    assert not job.is_over()
    job[0].exit()
    job.supervisor.wait_job()
    job.supervisor.begin_exit()
    job.supervisor.wait_job()


@pytest.mark.parametrize("how", ["job", "exit"])
def test_what_has_begun_is_not_over(supervise: Supervise, how: str) -> None:
    """Also before the supervisor's thread, which may be busy, has begun it: nobody waits for the last job."""
    job, is_free = supervise(), threading.Event()
    job.begin(until_exit=False)
    job.succeed()
    job.supervisor._loop.call_soon(partial(is_free.wait, LIMIT_S))  # type: ignore[arg-type]  # it returns a bool
    job.supervisor._loop.call_soon(job.supervisor._check)  # as after a frame
    if how == "job":
        job.supervisor.begin_job(until_exit=False)
    else:
        job.supervisor.begin_exit()
    assert not job.supervisor._settled.is_set()
    is_free.set()
    assert not job.is_over()


def test_processes_that_do_not_leave_are_reported(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once all are done and only an exit is awaited, a process that stays is named."""
    monkeypatch.setattr(stragglers, "_SHORTEST_S", SHORT_S)
    job = supervise(stall_warning_s=SHORT_S).begin()
    job.send_all(Kind.DONE)
    job[0].exit()
    text = re.compile("global_rank=1 .* The main process waits for it to leave")
    wait_until(lambda: text.search(capfd.readouterr().err) is not None)
    job[1].exit()
    job.supervisor.wait_job()


# -------------------------------------------------------------------------------------- failures


def test_a_failure_stops_the_others(supervise: Supervise) -> None:
    """All get STOP; the error names the rank and those that were stopped for it."""
    job = supervise(3).begin()
    job[1].fail("ValueError", "loss is nan")
    assert [job[rank].receive() for rank in range(3)] == [STOP] * 3
    error = job.failure_of(WorkerRaisedError)
    assert (error.global_rank, error.exception_type) == (1, "ValueError")
    assert error.exception_message == "loss is nan"
    assert (error.stopped, error.consequences) == ((0, 2), ())
    assert [record.global_rank for record in job.reported] == [1]


def test_a_rank_that_is_done_does_not_count_as_stopped(supervise: Supervise) -> None:
    """It is told to stop, as its process has not left; so has one that has exited before."""
    job = supervise(4).begin()
    job[2].send(Kind.DONE)
    job[3].send(Kind.DONE)
    job[3].exit()
    job[2].received()
    job[1].fail()
    assert job[2].receive() == STOP
    assert job.failure().stopped == (0,)
    assert not job[3].process.was_killed


def test_stop_is_sent_once(supervise: Supervise) -> None:
    """Further failures are collected in silence."""
    job = supervise(3, grace_period_s=NEVER_S).begin()
    job[0].fail()
    assert job[2].receive() == STOP
    job[1].fail()
    assert job[1].received() == [STOP]
    assert job[2].received() == []


def test_the_first_failure_is_raised(supervise: Supervise) -> None:
    """It is the one that happened first, whichever is reported first; the other is a consequence."""
    job = supervise().begin()
    now_s = time.monotonic()
    job[0].fail("KeyError", at_s=now_s)
    assert job[1].receive() == STOP
    job[1].fail("ValueError", at_s=now_s - 1)
    error = job.failure()
    assert (error.global_rank, error.stopped) == (1, ())
    assert error.consequences == ("global_rank 0 raised KeyError: ",)


def test_what_ranks_raise_after_stop_is_no_failure(supervise: Supervise) -> None:
    """JobStopped is how a rank reports that STOP has ended it."""
    job = supervise().begin()
    job[0].fail()
    assert job[1].receive() == STOP
    job[1].fail("JobStopped", is_consequence=True)
    error = job.failure()
    assert (error.stopped, error.consequences) == ((1,), ())


def test_a_job_that_failed_is_over_when_its_processes_are_gone(supervise: Supervise) -> None:
    """Not with the report, nor with the last SIGKILL: the kernel may need time."""
    job = supervise()
    job[1].process.is_killable = False
    job.begin()
    job[1].fail()
    job[0].exit()
    wait_until(lambda: job[1].process.was_killed)
    assert not job.is_over()
    job[1].exit(-9)
    job.failure_of(WorkerRaisedError)


def test_a_failure_of_another_node(supervise: Supervise) -> None:
    """It ends the job; the rank that passes it on has not failed, and is stopped with the others."""
    job = supervise().begin()
    record = job[0].record("ValueError", "there")
    job[1].send(Kind.ELSEWHERE, record.to_json())
    assert job[0].receive() == STOP
    error = job.failure()
    assert (error.global_rank, error.stopped) == (0, (1,))


def test_ranks_know_themselves(supervise: Supervise) -> None:
    """`ranks` returns an empty record of each local rank; there is no error before a failure."""
    job = supervise(here=True)
    assert [(each.global_rank, each.pid) for each in job.supervisor.ranks()] == [(0, 0), (1, GONE)]
    assert job.supervisor.error() is None


# -------------------------------------------------------------------------------------- consequences


@pytest.mark.parametrize("exits", [False, True])
def test_a_consequence_waits_for_its_cause(supervise: Supervise, exits: bool) -> None:
    """Nobody is stopped until the failure that led to it is reported; its rank may exit meanwhile."""
    job = supervise().begin()
    job[0].lose_peer()
    if exits:
        job[0].exit(1)
    assert job[1 if exits else 0].received() == []
    job[1].fail("ValueError")
    if not exits:
        assert job[0].receive() == STOP
    error = job.failure()
    assert error.global_rank == 1
    assert error.consequences == (f"global_rank 0 raised RuntimeError: {LOST_PEER}",)


def test_consequences_alone_are_a_failure(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """A while after the first one: later ones do not put that off."""
    job = supervise(3)
    monkeypatch.setattr(supervisor, "_SETTLE_S", 2 * SHORT_S)
    job.begin()
    job[0].lose_peer()
    job[0].received()
    monkeypatch.setattr(supervisor, "_SETTLE_S", NEVER_S)
    job[1].lose_peer()
    assert job[2].receive() == STOP
    error = job.failure_of(WorkerRaisedError)
    assert (error.global_rank, error.has_lost_peer) == (0, True)


def test_an_exit_that_others_needed(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others have only lost a peer, the rank that has ended by SystemExit is the cause."""
    monkeypatch.setattr(supervisor, "_SETTLE_S", SHORT_S)
    job = supervise().begin()
    record = job[1].record("SystemExit", "0", exit_status=0, phase=WorkerExitedError.BY_SYSTEM_EXIT)
    job[1].send(Kind.EXITED, record.to_json())
    job[1].send(Kind.DONE)
    job[1].exit()
    job[0].lose_peer()
    error = job.failure_of(WorkerExitedError)
    assert (error.global_rank, error.phase) == (1, WorkerExitedError.BY_SYSTEM_EXIT)


def test_an_exit_that_nobody_needed(supervise: Supervise) -> None:
    """It is no failure where all are done, and not the cause of one with a reason of its own."""
    job = supervise().begin()
    record = job[1].record("SystemExit", "0", exit_status=0)
    job[1].send(Kind.EXITED, record.to_json())
    job[1].send(Kind.DONE)
    assert job[1].received() == []
    job[0].fail()
    assert job.failure_of(WorkerRaisedError).global_rank == 0


@pytest.mark.parametrize("status", [-signal.SIGSEGV, 1])
def test_a_crash_that_is_seen_late_is_the_cause(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Of a process that a signal has ended after STOP, where the others have only lost a peer."""
    monkeypatch.setattr(supervisor, "_SETTLE_S", SHORT_S)
    job = supervise(grace_period_s=NEVER_S).begin()
    job[0].lose_peer()
    assert job[1].receive() == STOP
    job[1].exit(status)
    job[0].exit(1)
    error = job.failure_of(WorkerKilledError if status < 0 else WorkerRaisedError)
    assert (error.global_rank, error.stopped) == ((1, ()) if status < 0 else (0, (1,)))


def test_our_own_sigkill_is_no_crash(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the end of a rank that has reported a failure: neither is the cause, nor a consequence."""
    monkeypatch.setattr(supervisor, "_SETTLE_S", SHORT_S)
    job = supervise(grace_period_s=3 * SHORT_S).begin()
    job[0].lose_peer()
    assert job[1].receive() == STOP
    job[0].exit(-signal.SIGABRT)
    error = job.failure_of(WorkerRaisedError)
    assert job[1].process.was_killed
    assert (error.global_rank, error.stopped, error.consequences) == (0, (1,), ())


# -------------------------------------------------------------------------------------- ends of processes


@pytest.mark.parametrize(
    ("is_done", "status", "what"),
    [
        (False, 0, "exited with code 0 before it had finished"),
        (False, 3, "exited with code 3 before it had finished"),
        (False, None, "exited with an unknown code before it had finished"),
        (False, -signal.SIGSEGV, "was killed by SIGSEGV"),
        (False, -signal.SIGKILL, "was killed by SIGKILL"),
        (True, 3, "exited with code 3 after it had finished its part"),
        (True, -signal.SIGSEGV, "was killed by SIGSEGV"),
    ],
)
def test_a_process_that_ends_early_or_badly_has_failed(
    supervise: Supervise, is_done: bool, status: int | None, what: str
) -> None:
    """A rank that is not done has to say so, whatever its exit status; the job waits for good exits."""
    job = supervise().begin()
    if is_done:
        job[1].send(Kind.DONE)
    job[1].exit(status)
    assert job[0].receive() == STOP
    error = job.failure()
    assert (error.global_rank, error.what()) == (1, what)


def test_a_process_that_ends_before_hello(supervise: Supervise) -> None:
    """It has not even started as a rank, which the error says."""
    job = supervise()
    job.supervisor.start()
    job.supervisor.begin_job(until_exit=True)
    job[1].exit(1)
    assert job.failure_of(WorkerExitedError).phase == WorkerExitedError.NOT_STARTED


def test_an_unknown_exit_status_is_good_when_the_rank_is_done(supervise: Supervise) -> None:
    """Where other code of the program has waited for the process."""
    job = supervise().begin()
    job.send_all(Kind.DONE)
    job.exit_all(None)
    job.supervisor.wait_job()


def test_the_exit_after_a_report_is_no_second_failure(supervise: Supervise) -> None:
    """The error is what the rank has reported, without its exit code as a consequence."""
    job = supervise().begin()
    job[1].fail()
    job[1].exit(1)
    assert job.failure_of(WorkerRaisedError).consequences == ()


def test_all_that_a_process_has_sent_is_read_before_its_end(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its end is noticed after the first part of it."""
    monkeypatch.setattr(supervisor, "_CHUNK", 8)
    job = supervise()
    job[1].send(Kind.STORE_CANCEL, bytes(100))
    job[1].send(Kind.DONE)
    job[1].process.end(0)
    job.begin()
    job[0].send(Kind.DONE)
    job[0].exit()
    job.supervisor.wait_job()


# -------------------------------------------------------------------------------------- rank 0 here


def test_rank_zero_here_has_left_when_its_hooks_have_ended(supervise: Supervise) -> None:
    """It has no process that ends: after its failure the job is over when it says so, or when it is done."""
    job = supervise(here=True).begin()
    job[0].fail()
    assert job[1].receive() == STOP
    job[1].exit(1)
    assert not job.is_over()
    job[0].send(Kind.LEFT)
    assert job.failure().global_rank == 0


def test_rank_zero_here_that_is_done_is_not_waited_for(supervise: Supervise) -> None:
    """When another rank fails later, the end of its process ends the job."""
    job = supervise(here=True).begin()
    job[0].send(Kind.DONE)
    job[0].received()
    job[1].exit(1)
    error = job.failure()
    assert (error.global_rank, error.stopped) == (1, ())


def test_left_is_no_end_of_a_process(supervise: Supervise) -> None:
    """A started process has to end, whatever it reports."""
    job = supervise(grace_period_s=NEVER_S).begin()
    job[1].fail()
    job[1].send(Kind.LEFT)
    job[0].exit()
    assert not job.is_over()
    job[1].exit(1)
    assert job.failure().global_rank == 1
