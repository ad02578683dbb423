"""A warm process that has modules such as torch imported, and runs chosen tests in forks of itself.

The Python of an overlay starts it, in the copied project, of which it imports nothing. It reads one request
per line from stdin, and answers each with a line on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import coverage

COLLECTING = "collection"
TEST_VARIABLE = "RANKWISE_TEST_MUTATION_CONTEXT"
POLL_S = 0.05
NOT_STARTED = 70
STOPPED, NOTHING_SELECTED = 2, 5  # pytest's exit codes
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: a process ends with the one that started it
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of a run become children of the warm process


@dataclass(frozen=True)
class Request:
    """Which tests to run, in which order, and for how many seconds each at most.

    An empty `tests` means all of `files`. None begins after `budget_s` seconds of processor time. `config` is
    a file for coverage, which is then measured.
    """

    files: Sequence[str]
    tests: Sequence[str]
    limits_s: Mapping[str, float]
    usual_limit_s: float
    budget_s: float = math.inf
    config: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How the run of a request ended.

    `failed` are the tests that failed, or `COLLECTING`; `hung` is the one that ran past its limit.
    `durations` has the seconds of every test that passed.
    """

    failed: Sequence[str]
    hung: str | None
    durations: Mapping[str, float]
    cpu_s: float
    output: str


# ----------------------------------------------------------------------------------- in a fork


class Recorder:
    """A pytest plugin: select and order the tests, and write a line when one begins and when it ends."""

    def __init__(self, request: Request, events: int, measured: coverage.Coverage | None) -> None:
        self._request, self._events, self._measured = request, events, measured
        self._failed = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._request.tests:
            place = {name: number for number, name in enumerate(self._request.tests)}
            chosen = [each for each in items if each.nodeid in place]
            items[:] = sorted(chosen, key=lambda each: place[each.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._failed = False
        self._began = time.monotonic()
        self._write("begin", nodeid, 0.0)
        self._record_as(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Record what serves several tests under the name of their file."""
        test = os.environ.get(TEST_VARIABLE, "")
        if fixturedef.scope != "function" or getattr(fixturedef.func, "is_shared", False):
            self._record_as(test.partition("::")[0])
        try:
            return (yield)
        finally:
            self._record_as(test)

    def _record_as(self, name: str) -> None:
        os.environ[TEST_VARIABLE] = name  # of processes that are started
        if self._measured is not None:
            self._measured.switch_context(name)
            self._measured.set_option("run:context", name)  # of processes that are forked

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("failed" if self._failed else "passed", nodeid, time.monotonic() - self._began)
        if self._measured is not None:
            self._measured.switch_context("")
        if sum(os.times()[:4]) > self._request.budget_s:  # of this process and its children
            self._session.shouldstop = "the budget is spent"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", COLLECTING, 0.0)

    def _write(self, kind: str, name: str, seconds: float) -> None:
        os.write(self._events, json.dumps((kind, name, seconds)).encode() + b"\n")


def run_pytest(request: Request, folder: Path, events: int) -> None:
    """Run the tests in this process, which is a fork, and end it."""
    import coverage

    status = NOT_STARTED
    try:
        os.setsid()
        process_option(DEATH_SIGNAL, signal.SIGKILL)
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = ["pytest"]
        sys.orig_argv[:] = [sys.executable, "-m", "pytest"]
        measured = None
        if request.config is not None:
            os.environ["COVERAGE_PROCESS_START"] = request.config
            measured = coverage.Coverage(config_file=request.config)
            measured.start()
        stop = ("-x",) if request.tests else ()
        quiet = ("-q", "-p", "no:cacheprovider", "--rootdir=.", f"--basetemp={folder / 't'}", "--tb=short")
        status = int(pytest.main([*quiet, *stop, *request.files], [Recorder(request, events, measured)]))
        if measured is not None:
            measured.stop()
            measured.save()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)


# ----------------------------------------------------------------------------------- in the warm process


def run(request: Request, folder: Path) -> Outcome:
    """Run the tests in a fork, which is killed with all its descendants if a test runs past its limit."""
    reader, writer = os.pipe()
    with (folder / "output").open("w+b") as output:
        if (pid := os.fork()) == 0:
            os.close(reader)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run_pytest(request, folder, writer)
        os.close(writer)
        try:
            return _watch(pid, reader, request, folder / "output")
        finally:
            os.close(reader)
            _kill_descendants()


def _watch(pid: int, reader: int, request: Request, output: Path) -> Outcome:
    failed: list[str] = []
    durations: dict[str, float] = {}
    current, hung = COLLECTING, None
    deadline = time.monotonic() + request.usual_limit_s
    ended = None
    while ended is None:
        ended = _ended(pid)  # before the last events are read
        for kind, name, seconds in _events(reader):
            limit_s = request.limits_s.get(name) if kind == "begin" else None
            current, deadline = name, time.monotonic() + (limit_s or request.usual_limit_s)
            if kind == "passed":
                durations[name] = seconds
            elif kind == "failed":
                failed.append(name)
        if hung is None and time.monotonic() > deadline:
            hung = current
            os.kill(pid, signal.SIGKILL)
    status, cpu_s = ended
    if not failed and hung is None and status not in (0, STOPPED, NOTHING_SELECTED):
        failed.append(current)  # the process was killed, or pytest did not start
    return Outcome(failed, hung, durations, cpu_s, output.read_text(errors="replace")[-20000:])


def _events(reader: int) -> list[tuple[str, str, float]]:
    """Return what was written within `POLL_S`, whole lines only."""
    data = b""
    while select.select([reader], [], [], 0 if data.endswith(b"\n") else POLL_S)[0]:
        read = os.read(reader, 1 << 16)
        data += read
        if not read:
            time.sleep(POLL_S)  # the process is about to end
            break
    return [tuple(json.loads(line)) for line in data.splitlines()]


def _ended(pid: int) -> tuple[int, float] | None:
    """Return the exit code of a process that has ended, and the seconds of processor time that it took."""
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime) if ended else None


def _kill_descendants() -> None:
    """Kill what a run has left. Orphans are children of this process."""
    import psutil

    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def process_option(number: int, value: int) -> None:
    """Set an option of this process; see prctl(2)."""
    ctypes.CDLL(None).prctl(number, int(value), 0, 0, 0)


def main() -> None:
    """Answer requests until stdin ends."""
    del sys.path[0]  # this file's folder
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    process_option(DEATH_SIGNAL, signal.SIGKILL)
    process_option(SUBREAPER, 1)
    for name in ("psutil", "coverage", *sys.argv[2:]):
        importlib.import_module(name)
    for line in sys.stdin:
        outcome = run(Request(**json.loads(line)), folder)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()
