"""What torch's agent is given, and what its log, its signals and its failures become."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.multiprocessing import ProcessExitedException

from rankwise.errors import WorkerExitedError, WorkerRaisedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.elastic import (
    _STOPPED,
    ElasticLauncher,
    Nodes,
    _agent_log_filtered,
    _agent_signals,
    _Job,
    _worker_error,
)
from rankwise.launchers.elastic_rendezvous import LOOPBACK_HANDLER, NODES
from rankwise.launchers.worker_main import JobSpec
from rankwise.processes.memory_file import owned_descriptor
from rankwise.processes.signals import INTERRUPT_NOTICE
from rankwise.stores.rendezvous import RestartInfo
from tests.helpers.own_process import signal_handled
from tests.unit.launchers.supervised import LOST_PEER

THERE = FailureRecord(1, 1, 0, 101, at_s=1.0, exit_status=0)
RAISED = FailureRecord(0, 0, 0, 100, at_s=3.0, exception_type="ValueError", exception_message="not yet")
ECHO = replace(
    RAISED, at_s=2.0, exception_type="RuntimeError", exception_message=LOST_PEER, is_consequence=True
)


@pytest.fixture
def job() -> Iterator[_Job]:
    """Return a job of two ranks on one node."""
    with ExitStack() as cleanup:
        yield _Job(
            JobSpec(entry=print, start_method="fork"),
            values=[owned_descriptor(cleanup) for _ in range(2)],
            failures=[owned_descriptor(cleanup) for _ in range(2)],
            parent_pipe=owned_descriptor(cleanup),
            is_alone=True,
            key=b"",
        )


@pytest.mark.parametrize(
    ("left", "exits", "why"),
    [
        ([RAISED], [(100, 1)], "global_rank 0 raised ValueError: not yet"),
        ([ECHO, THERE], [(101, -9)], "global_rank 1 was killed by SIGKILL"),
        ([THERE], [(101, 3)], "global_rank 1 exited with code 3"),
        (
            [ECHO, THERE],
            [],
            "a rank ended without an exception; global_rank 0 raised RuntimeError: Connection closed by peer",
        ),
        ([THERE], [(999, -9)], "a rank ended without an exception"),
    ],
    ids=["raised", "killed", "left", "not reported", "of another start"],
)
def test_why_all_start_again(
    job: _Job,
    caplog: pytest.LogCaptureFixture,
    left: list[FailureRecord],
    exits: list[tuple[int, int]],
    why: str,
) -> None:
    """The rank that ended first is named, also without a report; not one that failed as a consequence."""
    for record in left:
        os.pwrite(job.failures[record.local_rank].number, record.to_json(), 0)
    for pid, status in exits:
        job.note_exit(pid, status)
    job.begin(RestartInfo(1, "a job"))
    assert caplog.messages == [f"All ranks start again (restart 1): {why}"]
    assert job.unreported == []


def test_a_signal_that_was_ignored_is_ignored_again() -> None:
    """Under nohup: older versions of torch set handlers of SIGHUP and others, and leave them."""
    with signal_handled(signal.SIGHUP, signal.SIG_IGN):
        with _agent_signals():
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_record_that_is_cut_off_is_left_out(job: _Job) -> None:
    """A rank may be killed while it writes: what the others have written counts."""
    for file, record, end in zip(job.failures, (RAISED, ECHO), (None, -20), strict=True):
        os.pwrite(file.number, record.to_json()[:end], 0)
    assert job.records() == [RAISED]


def test_why_several_nodes_start_again(job: _Job, caplog: pytest.LogCaptureFixture) -> None:
    """Nodes may have come or gone, for which the ranks were asked to stop; the first start is no restart."""
    job.is_alone = False
    stopped = replace(RAISED, exception_type=_STOPPED)
    os.pwrite(job.failures[0].number, stopped.to_json(), 0)
    job.begin(RestartInfo(0, "a job"))
    job.begin(RestartInfo(2, "a job"))
    assert caplog.messages == ["All ranks start again (restart 2): nodes came or went, or a rank was killed"]


@pytest.mark.parametrize("grace_period_s", [1.0, 45.2])
def test_what_the_agent_of_one_node_is_given(job: _Job, grace_period_s: float) -> None:
    """A rendezvous on loopback, a random id, whole seconds, and at least 30 of them to stop."""
    launcher = ElasticLauncher("fork", 2, Nodes(), 3, grace_period_s, timedelta(seconds=8.5))
    config, other = launcher._config(job), launcher._config(job)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 2, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.start_method) == (LOOPBACK_HANDLER, "", "fork")
    assert config.run_id.startswith("rankwise-")
    assert config.run_id != other.run_id
    assert config.rdzv_configs["timeout"] == 9
    assert config.rdzv_configs["on_start"] == job.begin
    assert config.shutdown_timeout == (30 if grace_period_s < 30 else 46)


def test_what_the_agents_of_several_nodes_are_given(job: _Job) -> None:
    """Where they meet, how many may come, and the id that they have in common."""
    nodes = Nodes(2, 3, "node0:29400", "a run")
    launcher = ElasticLauncher("spawn", 2, nodes, 0, 1.0, timedelta(seconds=8))
    config = launcher._config(job)
    assert (config.min_nodes, config.max_nodes) == (2, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == (NODES, "node0:29400", "a run")


@pytest.mark.parametrize("endpoint", ["", "node0:29400"])
def test_what_the_ranks_are_given(endpoint: str) -> None:
    """A file for each one's value and failure; on one node also a random key, which others do not get."""
    launcher = ElasticLauncher("spawn", 2, Nodes(endpoint=endpoint), 0, 1.0, timedelta(seconds=8))
    with ExitStack() as cleanup:
        first, second = (launcher._prepare(print, {}, cleanup) for _ in range(2))
        assert (len(first.values), len(first.failures)) == (2, 2)
        assert first.is_alone == (first.key != second.key) == (not endpoint)
        assert len(first.key) == (0 if endpoint else 32)
        assert repr(first).count("key") == 0
    assert launcher.has_other_ranks == bool(endpoint)


def test_ctrl_c_ends_the_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """The first one lets ranks stop at a boundary, and says so; the second kills them."""
    with pytest.raises(KeyboardInterrupt), _agent_signals():
        with pytest.raises(SignalException) as first:
            signal.raise_signal(signal.SIGINT)
        assert first.value.sigval == signal.SIGTERM
        assert capfd.readouterr().err == INTERRUPT_NOTICE
        with pytest.raises(SignalException) as second:
            signal.raise_signal(signal.SIGINT)
        assert second.value.sigval == signal.SIGKILL
        raise second.value
    assert capfd.readouterr().err == ""


def test_sigterm_ends_the_agent() -> None:
    """Once, also where it comes again at once; the program then exits as a shell expects."""
    with pytest.raises(SystemExit) as ended, _agent_signals():
        with pytest.raises(SignalException) as caught:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise caught.value
    assert ended.value.code == 143


@pytest.mark.parametrize("value", [None, "SIGTERM"])
def test_the_agents_variable_is_restored(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Torch names the signals that it handles in the environment, and leaves that there."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    if value is not None:
        monkeypatch.setenv(name, value)
    with _agent_signals():
        os.environ[name] = "SIGQUIT"
    assert os.environ.get(name) == value


def test_the_agents_log(caplog: pytest.LogCaptureFixture) -> None:
    """It names the ranks that ended without an exception, and is not shown, but for what is critical."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level, exits = logger.level, list[tuple[int, int]]()
    with _agent_log_filtered(lambda pid, code: exits.append((pid, code))):
        for error in (ValueError("a rank's"), ProcessExitedException("", 1, 17, exit_code=-9)):
            logger.error("failed", exc_info=error)
        logger.critical("the agent is lost")
    assert caplog.messages == ["the agent is lost"]
    assert exits == [(17, -9)]
    assert (logger.level, logger.filters) == (level, [])


def failed(global_rank: int, record: FailureRecord, exit_code: int) -> ProcessFailure:
    """Return torch's record of a failure; there is no error file."""
    return ProcessFailure(global_rank % 2, record.pid, exit_code, "")


def test_the_error_of_an_elastic_job(job: _Job) -> None:
    """The first cause that a rank has reported, which torch's record adds nothing to; else the agent's."""
    unreported = _worker_error({3: failed(3, THERE, 5)}, job, 0.0)
    assert isinstance(unreported, WorkerExitedError)
    place = (unreported.global_rank, unreported.local_rank, unreported.node_rank)
    assert (place, unreported.exit_code) == ((3, 1, 1), 5)  # the place follows from the ranks of a node
    os.pwrite(job.failures[0].number, RAISED.to_json(), 0)
    error = _worker_error({0: failed(0, RAISED, 1), 3: failed(3, THERE, 5)}, job, 0.0)
    assert isinstance(error, WorkerRaisedError)
    assert (error.global_rank, error.exception_type) == (0, "ValueError")
    assert error.consequences == ("global_rank 3 exited with code 5",)
