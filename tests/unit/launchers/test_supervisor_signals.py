"""What a supervisor does when its own process is signalled: ask to stop, end the job, kill."""

import os
import signal
import threading
from typing import Any

import pytest

from rankwise.launchers.channel import Kind
from rankwise.processes import signals
from rankwise.processes.signals import INTERRUPT_NOTICE, StoppedBySignal
from tests.helpers.own_process import signal_handled
from tests.unit.launchers.supervised import NEVER_S, SHORT_S, STOP, Job, Supervise


def asked(number: int) -> tuple[Kind, bytes]:
    """Return the frame that asks a rank to stop at a boundary."""
    return Kind.REQUEST, b"%d" % number


def training(supervise: Supervise, **options: Any) -> Job:
    """Return a job whose last rank trains: it stops at a boundary when it is asked to."""
    job = supervise(grace_period_s=NEVER_S, **options).begin()
    job[1].send(Kind.IN_LOOP, b"1")
    assert job[1].received() == []
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_asks_one_rank_that_trains(
    supervise: Supervise, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """It agrees with the others on the step; the job ends as those that have stopped say, in silence."""
    job = training(supervise, stop_signals=(signal.SIGTERM, signal.SIGUSR1))
    with pytest.raises(StoppedBySignal) as stopped, job.supervisor.handle_signals():
        signal.raise_signal(number)
        assert job[1].receive() == asked(number)
        assert job[0].received() == []
        job.send_all(Kind.STOPPED, b"%d" % number)
        job.exit_all(143)
        job.supervisor.wait_job()
    assert stopped.value.signal_number == number
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("why", ["none trains", "it has left its loop", "it has ended"])
def test_a_signal_ends_ranks_that_do_not_train(supervise: Supervise, why: str) -> None:
    """They come to no boundary: all get STOP at once, and the job ends by the signal."""
    job = supervise(3, grace_period_s=NEVER_S).begin()
    if why == "it has left its loop":
        job[1].send(Kind.IN_LOOP, b"1")
        job[1].send(Kind.IN_LOOP, b"0")
    elif why == "it has ended":
        job[1].send(Kind.IN_LOOP, b"1")
        job[1].send(Kind.DONE)
        job[1].exit()
    assert job[0].received() == []
    with pytest.raises(SystemExit) as ended, job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert [job[rank].receive() for rank in (0, 2)] == [STOP, STOP]
        for rank in (0, 2):
            job[rank].exit()
        job[1].process.end(0)
        job.supervisor.wait_job()
    assert (ended.value.code, type(ended.value)) == (143, SystemExit)
    assert job.supervisor.ended_by == signal.SIGTERM


def test_a_signal_that_asks_nobody_to_stop(supervise: Supervise) -> None:
    """SIGHUP ends a job whose ranks train, where the user has not asked for a stop."""
    job = training(supervise)
    with (
        signal_handled(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        pytest.raises(SystemExit) as ended,
        job.supervisor.handle_signals(),
    ):
        signal.raise_signal(signal.SIGHUP)
        assert job[1].receive() == STOP
        job.exit_all()
        job.supervisor.wait_job()
    assert ended.value.code == 129


def test_the_same_request_again_changes_nothing(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals several times; a later SIGTERM ends the job, and one more kills."""
    job = training(supervise)
    with pytest.raises(SystemExit) as ended, job.supervisor.handle_signals():
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert job[1].received() == [asked(signal.SIGTERM)]
        monkeypatch.setattr(signals, "DEBOUNCE_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert job[1].receive() == STOP
        assert not job[1].process.was_killed
        signal.raise_signal(signal.SIGTERM)
        job.supervisor.wait_job()
    assert job[1].process.was_killed
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("first", "answer"), [(signal.SIGINT, STOP), (signal.SIGUSR2, asked(signal.SIGTERM))]
)
def test_sigterm_after_another_signal_is_no_repeat(
    supervise: Supervise, first: int, answer: tuple[Kind, bytes]
) -> None:
    """Ctrl-C and the request for stacks are requests of their own, whatever comes next."""
    job = training(supervise, pid=os.getpid())
    with pytest.raises(SystemExit) as ended, job.supervisor.handle_signals():
        signal.raise_signal(first)
        job[1].received()
        signal.raise_signal(signal.SIGTERM)
        assert job[1].receive() == answer
    assert ended.value.code == 143


def test_ctrl_c_again_ends_training(supervise: Supervise, capfd: pytest.CaptureFixture[str]) -> None:
    """The first one asks and says so; the second, however soon, ends the job; the third kills."""
    job = training(supervise)
    with pytest.raises(KeyboardInterrupt) as interrupted, job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGINT)  # Python's own handler, which would raise here, is not called
        assert job[1].receive() == asked(signal.SIGINT)
        assert not job.supervisor.was_interrupted
        signal.raise_signal(signal.SIGINT)
        assert job[1].receive() == STOP
        assert not job[1].process.was_killed
        signal.raise_signal(signal.SIGINT)
        job.supervisor.wait_job()
    assert not isinstance(interrupted.value, StoppedBySignal)
    assert job.supervisor.was_interrupted
    assert job[1].process.was_killed
    assert capfd.readouterr().err == INTERRUPT_NOTICE


def test_a_request_while_the_job_ends(supervise: Supervise) -> None:
    """After a failure nobody is asked to stop; a signal kills what is left."""
    job = training(supervise)
    job[0].fail()
    assert job[1].receive() == STOP
    with pytest.raises(SystemExit), job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        job.supervisor.wait_job()
    assert job[1].process.was_killed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_came_too_late_is_raised(supervise: Supervise, number: int) -> None:
    """The job was done all the same, and has its values: the block raises `StoppedBySignal`."""
    job = training(supervise)
    with pytest.raises(StoppedBySignal) as stopped, job.supervisor.handle_signals():
        signal.raise_signal(number)
        job.send_all(Kind.DONE)
        job.exit_all()
        job.supervisor.wait_job()
    assert stopped.value.signal_number == number
    with job.supervisor.handle_signals():
        pass  # that signal is not raised again


def test_with_a_rank_here_the_program_gets_the_signal(supervise: Supervise) -> None:
    """The block raises what the signal means to any program: rank 0 has no result of its ranks."""
    job = training(supervise, here=True)
    with pytest.raises(SystemExit) as ended, job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert job[1].receive() == asked(signal.SIGTERM)
    assert not isinstance(ended.value, StoppedBySignal)


def test_with_a_rank_here_ctrl_c_interrupts_the_program(supervise: Supervise) -> None:
    """Python raises as always, and the ranks are asked to stop all the same."""
    job = training(supervise, here=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), job.supervisor.handle_signals():
        assert signal.getsignal(signal.SIGINT) is handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert job[1].receive() == asked(signal.SIGINT)


def test_a_program_that_handles_ctrl_c_itself(supervise: Supervise) -> None:
    """Its handler decides: no rank is asked to stop, and nothing is raised."""
    job = training(supervise)
    calls: list[int] = []
    handled = signal_handled(signal.SIGINT, lambda number, frame: calls.append(number))
    with handled, job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGINT)
        assert job[1].received() == []
    assert calls == [signal.SIGINT]


def test_ranks_that_come_to_no_boundary(supervise: Supervise) -> None:
    """After the time that a collective may take, the signal ends the job at once."""
    job = training(supervise, teardown_timeout_s=4 * SHORT_S)
    with pytest.raises(SystemExit) as ended, job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert job[1].receive() == asked(signal.SIGTERM)
        assert job[1].receive() == STOP
        job.exit_all()
        job.supervisor.wait_job()
    assert ended.value.code == 143


def test_ranks_that_have_stopped_have_no_time_limit(supervise: Supervise) -> None:
    """Nothing is left to look at once all have ended."""
    job = training(supervise, teardown_timeout_s=40 * SHORT_S)
    with pytest.raises(StoppedBySignal), job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert job[1].receive() == asked(signal.SIGTERM)
        for rank in (job[0], job[1]):
            rank.send(Kind.STOPPED, b"15")
            rank.exit(143)
        threading.Event().wait(60 * SHORT_S)
        job.supervisor.wait_job()


def test_the_time_limit_of_a_stop_ends_the_job_once(supervise: Supervise) -> None:
    """Also where this process is suspended meanwhile: nobody is killed before the grace period ends."""
    job = training(supervise, teardown_timeout_s=2 * SHORT_S)
    with pytest.raises(SystemExit), job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGTERM)
        assert [job[1].receive(), job[1].receive()] == [asked(signal.SIGTERM), STOP]
        job.supervisor._stop_request._last_look_s = 0.0  # as after a long time
        threading.Event().wait(6 * SHORT_S)
        assert not job[1].process.was_killed


def test_stacks_on_sigusr2(supervise: Supervise, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of a rank here are written; the job goes on."""
    job = training(supervise, here=True, pid=os.getpid())
    with job.supervisor.handle_signals():
        signal.raise_signal(signal.SIGUSR2)
        assert job[1].received() == []
    text = capfd.readouterr().err
    assert "SIGUSR2 was sent to the main process; stacks of global_rank=0 (this process):" in text
    assert "test_stacks_on_sigusr2" in text
