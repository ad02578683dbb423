"""The pytest plug-in: a test with the marker `distributed` runs on every rank of a job, as one test.

It imports nothing but pytest until a test has the marker.
"""

from __future__ import annotations

import inspect
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

try:
    import pytest
except ImportError:
    from rankwise.errors import MissingExtraError

    raise MissingExtraError(package="pytest", extra="testing", purpose="the marker distributed") from None

if TYPE_CHECKING:
    from rankwise.errors import WorkerError
    from rankwise.strategies import DDPStrategy, Strategy

MARKER = "distributed"
_USE = "distributed(world_size=2, timeout=60): run the test on every rank of a job (rankwise.testing)"


@dataclass(frozen=True)
class _Settings:
    """The arguments of the marker."""

    world_size: int = 2
    timeout: float = 60.0


class _Outcome(NamedTuple):
    """How a test failed on a rank: its representation in pytest's report, and its exception, pickled."""

    longrepr: Any
    pickled: bytes


_STRATEGY = pytest.StashKey["DDPStrategy"]()
_FAILURE = pytest.StashKey[tuple["WorkerError", "_Outcome | None"]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _USE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the marker where it would have no effect, or with wrong arguments."""
    for item in items:
        if item.get_closest_marker(MARKER) is not None and (problem := _problem_of(item)):
            raise pytest.UsageError(
                f"@pytest.mark.{MARKER} is not possible: {item.nodeid} {problem}.\n  Fix: {_USE}"
            )


def _problem_of(item: pytest.Item) -> str:
    """Return why an item cannot have the marker; an empty string if it can."""
    if type(item) is not pytest.Function:
        return f"is no test function but a {type(item).__name__}, which runs its test itself"
    if inspect.iscoroutinefunction(item.obj) or inspect.isgeneratorfunction(item.obj):
        return "is a coroutine or generator"
    try:
        _settings_of(item)
    except TypeError as error:
        return f"has wrong arguments: {error}"
    return ""


def _settings_of(item: pytest.Item) -> _Settings | None:
    marker = item.get_closest_marker(MARKER)
    return None if marker is None else _Settings(*marker.args, **marker.kwargs)


def _strategy_of(item: pytest.Item) -> DDPStrategy:
    from rankwise.testing.jobs import new_strategy

    if _STRATEGY not in item.stash:
        settings = _settings_of(item)
        if settings is None:
            raise pytest.UsageError(f"rank_strategy needs the marker: {_USE}")
        item.stash[_STRATEGY] = new_strategy(settings.world_size, settings.timeout)
    return item.stash[_STRATEGY]


@pytest.fixture
def rank_strategy(request: pytest.FixtureRequest) -> DDPStrategy:
    """The strategy of a test with the marker `distributed`: its ranks, collectives and modules."""
    return _strategy_of(request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the marker on every rank; raise the first rank's failure."""
    __tracebackhide__ = True
    settings = _settings_of(pyfuncitem)
    if settings is None:
        return None
    from rankwise.errors import WorkerError, WorkerTimedOutError
    from rankwise.testing.jobs import run_on

    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(settings.world_size)]
        try:
            run_on(_strategy_of(pyfuncitem), _run_test, pyfuncitem, files)
        except WorkerError as error:
            # When the job took too long, no rank is to blame.
            is_late = isinstance(error, WorkerTimedOutError) and error.exception_type == error.TIME_LIMIT
            outcome = None if is_late else _read(files[error.global_rank])
            pyfuncitem.stash[_FAILURE] = error, outcome
            raise _exception_of(outcome, error) from None
    return True


def _run_test(strategy: Strategy, item: pytest.Function, files: Sequence[IO[bytes]]) -> None:
    """Run the test function on a rank; on failure write how pytest shows it, and raise it.

    The rank is a fork, so that it has the fixtures' values, and the functions as pytest has compiled them.
    """
    parameters = inspect.signature(item.obj).parameters
    arguments = {name: value for name, value in item.funcargs.items() if name in parameters}
    try:
        item.obj(**arguments)
    except BaseException as error:
        pickle.dump(_outcome(item, error), file := files[strategy.global_rank])
        file.flush()
        raise


def _outcome(item: pytest.Function, error: BaseException) -> _Outcome:
    longrepr: Any = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
    if isinstance(error, pytest.skip.Exception):
        path, line, _ = item.location
        longrepr = (path, (line or 0) + 1, str(error))
    try:
        pickle.loads(pickled := pickle.dumps(error))
    except Exception:  # noqa: BLE001  pickling runs code of any class
        pickled = b""
    return _Outcome(longrepr, pickled)


def _read(file: IO[bytes]) -> _Outcome | None:
    """Return the outcome that a rank has written; None if it was killed, and has not written all."""
    file.seek(0)
    try:
        outcome: _Outcome = pickle.load(file)
    except (EOFError, pickle.UnpicklingError):
        return None
    return outcome


def _exception_of(outcome: _Outcome | None, error: BaseException) -> Any:
    """Return the exception that the rank raised, or `error` if that cannot be had."""
    if outcome is not None and isinstance(outcome.longrepr, tuple):
        return pytest.skip.Exception(outcome.longrepr[-1])
    return pickle.loads(outcome.pickled) if outcome is not None and outcome.pickled else error


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
    """Return the report of a test that has failed on a rank: that rank's own, with the others' tracebacks."""
    if call.when != "call" or _FAILURE not in item.stash:
        return None
    report = pytest.TestReport.from_item_and_call(item, call)
    error, outcome = item.stash[_FAILURE]
    error.shows_others = False  # in favour of the sections
    report.longrepr = str(error)
    if outcome is not None:
        report.longrepr = outcome.longrepr
        report.sections.append(("ranks", f"{error.summary()}\n  Seen: {error.seen()}"))
    for rank, text in sorted(error.other_tracebacks.items()):
        if rank not in error.alike:
            report.sections.append((f"traceback of global_rank={rank}", text))
    return report
