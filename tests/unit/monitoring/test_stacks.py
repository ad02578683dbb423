"""The stacks of all ranks on stderr, and the place of torch's flight record."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from rankwise.failures.exchange import resolve_cause
from rankwise.monitoring.heartbeat import MonitoredRank
from rankwise.monitoring.stacks import STACKS_SIGNAL, dump_stacks, stacks_on_signal, write_flight_record
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.started_process import PopenProcess
from rankwise.ranks import RankInfo
from tests.helpers.own_process import signal_handled


def test_the_own_stacks(workers: list[MonitoredRank], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is this process shows its stacks there too."""
    dump_stacks(workers[:1], "a reason")
    title, _, stacks = capsys.readouterr().err.partition("\n")
    assert title == "rankwise: a reason; stacks of global_rank=0 (this process):"
    assert "in test_the_own_stacks" in stacks


def test_a_handler_of_the_users_stays() -> None:
    """The signal reaches it in a job, too."""
    seen: list[int] = []
    with signal_handled(STACKS_SIGNAL, lambda number, _: seen.append(number)), stacks_on_signal():
        signal.raise_signal(STACKS_SIGNAL)
    assert seen == [STACKS_SIGNAL]


@pytest.fixture
def _flight_recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not write_flight_record(0):
        pytest.skip("this torch has no flight record to write")


@pytest.mark.usefixtures("_flight_recorder")
def test_the_flight_record_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no folder that all share, not for them to read, and somebody else's link is not followed."""
    path = Path(write_flight_record(3))
    assert path == tmp_path / "cache" / "torch" / "rankwise_flight_record_3"
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_flight_record(3) == str(path)  # over the one before
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "record"))
    _, record = resolve_cause(dist.DistStoreError("wait timeout after 5ms"), RankInfo(1, 1, 0, 2, 2, 1), None)
    assert record.notes == (f"the flight record of global_rank=1 is {tmp_path / 'record1'}",)
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "record2").symlink_to(tmp_path / "mine")
    assert write_flight_record(2) == ""
    assert (tmp_path / "mine").read_text() == "precious"
    os.mkfifo(tmp_path / "record3")
    assert write_flight_record(3) == ""  # and does not wait for a reader


def test_a_rank_without_the_handler(workers: list[MonitoredRank], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that runs another program, which the signal would kill, does not get it."""
    with subprocess.Popen(["sleep", "60"]) as popen:
        process = PopenProcess(popen, ParentDeathPipe())
        worker = replace(workers[1], process=process)
        worker.has_started = True
        dump_stacks([worker], "a reason")
        assert popen.poll() is None
        popen.kill()
    process.close()
    assert "it runs another program" in capsys.readouterr().err


def test_a_rank_that_gets_the_signal_late(
    workers: list[MonitoredRank], capsys: pytest.CaptureFixture[str]
) -> None:
    """The stacks of the next rank wait for one that runs late on a busy machine; one that left is named."""
    code = """if True:
        import signal, sys, time
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX])
        signal.signal(signal.SIGRTMAX, lambda *_: None)
        print("ready", flush=True)
        sys.stdin.readline()
        if "leaves" not in sys.argv:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGRTMAX])
            time.sleep(60)
    """
    for arguments, expected in (([], ""), (["leaves"], "  (it has left)\n")):
        command = [sys.executable, "-c", code, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as popen:
            assert popen.stdin is not None
            assert popen.stdout is not None
            popen.stdout.readline()
            process = PopenProcess(popen, ParentDeathPipe())
            worker = replace(workers[1], process=process)
            worker.has_started = True
            began = time.monotonic()
            timer = threading.Timer(0.3, popen.stdin.write, (b"\n",))
            timer.start()
            dump_stacks([worker], "a reason")
            waited_s = time.monotonic() - began
            timer.join()
            popen.kill()
        process.close()
        assert waited_s > 0.2
        assert capsys.readouterr().err.partition("\n")[2] == expected
