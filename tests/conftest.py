"""Polices every test: environment, processes, threads, process group, ports, signal handlers, files."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import police, processes
from tests.helpers.scripts import ScriptRunner

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Let Ctrl-C reach the programs that tests start, even if this run was started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give this run, and what it starts, a temporary folder of its own, so that its leftovers are ours."""
    folder = tmp_path_factory.mktemp("t")  # short: the path of a Unix socket has 108 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _police(temp_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves anything behind, by name, after putting it right for the next one."""
    marker = f"{os.getpid()}-{next(_numbers)}"
    os.environ[processes.MARKER] = marker
    checks = police.all_checks(marker, temp_folder, tmp_path_factory.getbasetemp())
    yield
    problems = police.settle(checks)
    os.environ.pop(processes.MARKER, None)
    if problems:
        pytest.fail("This test did not leave things as they were:\n  " + "\n  ".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest) -> None:
    """Let a long series have the time that its own mark says: faulthandler's limit is for the others."""
    limit = request.node.get_closest_marker("timeout")
    if limit is not None and limit.args[0] >= float(request.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[ScriptRunner]:
    """Run Python programs in a session of their own; see `ScriptRunner`."""
    runner = ScriptRunner(tmp_path)
    yield runner
    runner.abandon_all()
