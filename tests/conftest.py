"""Fixtures of all tests. Each test is checked for what it leaves behind."""

import faulthandler
import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers import huge_pages, leak_checks
from tests.helpers.at_startup import sitecustomize
from tests.helpers.scripts import ScriptRunner

gc.disable()  # until all tests are collected: imports leave little garbage, and each search takes longer

HERE = Path(__file__).parent
TORCH_VERSIONS = (
    "unit/test_torch_internals.py",
    *("unit/gradient_sync", "unit/precision", "unit/process_group", "unit/stores", "unit/processes"),
    *("process/test_agents_store.py", "process/test_collective_check.py", "process/test_collectives.py"),
    *("process/test_compiled.py", "process/test_elastic.py", "process/test_evaluation.py"),
    *("process/test_gradient_sync.py", "process/test_group_end.py", "process/test_impostors.py"),
    *("process/test_launch.py", "process/test_precision.py", "process/test_rendezvous.py"),
    *("process/test_resuming.py", "process/test_sparse_gradients.py", "process/test_stopping.py"),
    *("process/test_training_state.py", "process/test_uneven_inputs.py"),
)
"""What touches private members of torch, and real processes: `.ci/torch` runs these on other versions."""


SLOW_FOLDERS = ("process", "docs", "programs", "fuzz")
"""Their tests are of the tier `full`, if they have neither the marker `quick` nor `soak`."""
NEW_INTERPRETERS = ("spawn", "forkserver", "elastic", "popen", "torchrun")
"""Words in parameters of tests whose ranks import torch, which takes seconds: of the tier `full`, too."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no test of the tier that the command runs: the default one, or `-m full`."""
    if not collection_path.name.startswith("test_"):
        return None
    if _is_in(collection_path, (*SLOW_FOLDERS, "cluster")) and _is_default_tier(config):
        return None if "pytest.mark.quick" in collection_path.read_text() else True
    if _is_in(collection_path, ("unit",)) and config.option.markexpr.startswith("full"):
        return None if "pytest.mark.full" in collection_path.read_text() else True
    return None


def _is_default_tier(config: pytest.Config) -> bool:
    """Return whether the command names neither a path nor a marker."""
    names_no_path = config.args_source is config.ArgsSource.TESTPATHS
    return names_no_path and config.option.markexpr in config.getini("addopts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folders; leave the tier `full` out where the command names no path or marker."""
    for path, of_file in itertools.groupby(items, lambda item: item.path):
        is_slow, touches_torch = _is_in(path, SLOW_FOLDERS), _is_in(path, TORCH_VERSIONS)
        for item in of_file:
            if touches_torch:
                item.add_marker(pytest.mark.torch_versions)
            is_quick = item.get_closest_marker("quick") is not None and not _starts_interpreters(item)
            if is_slow and not is_quick and item.get_closest_marker("soak") is None:
                item.add_marker(pytest.mark.full)
    gc.enable()
    huge_pages.use()
    if _is_default_tier(config):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def _starts_interpreters(item: pytest.Item) -> bool:
    if not (isinstance(item, pytest.Function) and hasattr(item, "callspec")):
        return False
    texts = [each for each in item.callspec.params.values() if isinstance(each, str)]
    return any(word in each for each in texts for word in NEW_INTERPRETERS)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, except with `-m gpu`: where torch sees one, it works differently on CPUs, too.

    For example, a forked process cannot run a backward pass if its parent has run one.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_sessionfinish() -> None:
    """Search for garbage once; pytest and Python would search all again, seven times."""
    gc.collect()
    gc.freeze()


def _is_in(path: Path, places: Sequence[str]) -> bool:
    return any(path.is_relative_to(HERE / place) for place in places)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Make SIGINT interrupt the programs that tests start, also if this run was started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _lines_are_whole() -> None:
    """Let the programs that tests start write a line at once, so that lines of two ranks do not mix."""
    os.environ.pop("PYTHONUNBUFFERED", None)  # with it, print writes each argument on its own


@pytest.fixture(autouse=True, scope="session")
def temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set the temporary folder of this run and of the processes that it starts to one of its own."""
    folder = tmp_path_factory.mktemp("t")  # short: the path of a Unix socket has 108 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def _ranks_are_compared() -> Iterator[None]:
    """Compare parameters, buffers and optimizer states of all ranks at the end of each fit of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sitecustomize.VARIABLE, "1")
        patch.setenv("PYTHONPATH", str(Path(sitecustomize.__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True)
def _ranks_may_differ(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave that out for a test with the marker `ranks_may_differ`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("ranks_may_differ"):
            patch.delenv(sitecustomize.VARIABLE)
        yield


@pytest.fixture(autouse=True)
def _check_for_leaks(temp_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves something behind. What it has left is removed before the next test."""
    with leak_checks.new_marker() as marker:
        checks = leak_checks.all_checks(marker, temp_folder, tmp_path_factory.getbasetemp())
        yield
        leak_checks.fail_if_changed(checks, "This test")


@pytest.fixture(autouse=True)
def _no_faulthandler_limit(request: pytest.FixtureRequest) -> None:
    """Cancel faulthandler's time limit for a test whose own limit (`@pytest.mark.timeout`) is longer."""
    limit = request.node.get_closest_marker("timeout")
    if limit is not None and limit.args[0] >= float(request.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[ScriptRunner]:
    """Run Python programs in a session of their own; see `ScriptRunner`."""
    runner = ScriptRunner(tmp_path)
    yield runner
    runner.kill_all()
