"""What ended a job is reported, whatever exceptions and values are made of."""

import operator
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from rankwise.errors import WorkerRaisedError
from rankwise.failures.classify import make_printable
from rankwise.strategies import DDPElasticStrategy, DDPStrategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import TORCHRUN, ddp, with_tests
from tests.process.test_host_programs import METHODS

SOAK = pytest.mark.soak
IN_SCRIPTS = with_tests({"PYTEST_CURRENT_TEST": None})  # they import pytest, and are not run by it


class TextHangs(Exception):
    def __str__(self) -> str:
        time.sleep(300)
        return ""


class TextExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoDictionary(Exception):
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # that is the point
        raise RuntimeError


class Caused(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.__cause__ = NoAttributes()


def elastic(start_method: str, **arguments: Any) -> DDPElasticStrategy:
    options = {"accelerator": "cpu", "devices": 2, "max_restarts": 0, **arguments}
    return DDPElasticStrategy(start_method=start_method, **options)


OTHERS = ((elastic, "spawn"), (ddp, "spawn"), (ddp, "forkserver"))
FUNCTIONS = [(ddp, "fork"), (elastic, "fork"), *(pytest.param(*each, marks=SOAK) for each in OTHERS)]
"""The strategies, and their start methods, that run a function in other processes than the caller's."""

Create = Callable[..., DDPStrategy]
KINDS = [TextHangs, TextExits, NoAttributes, NoDictionary, Caused]


@pytest.mark.parametrize(("strategy", "method"), FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_whose_class_is_in_the_way(kind: type[Exception], strategy: Create, method: str) -> None:
    """The rank and the type are reported, and where it was raised."""
    with pytest.raises(WorkerRaisedError) as caught:
        strategy(method, timeout=60.0).launch(fail, kind)
    check(caught.value, kind)


def check(error: WorkerRaisedError, kind: type[Exception]) -> None:
    assert (error.global_rank, error.exception_type) == (1, kind.__name__)
    assert "test_lost_causes.py" in error.traceback_text
    assert ("could not be had" in error.exception_message) == (kind in (TextHangs, TextExits))


RAISES = """
    import sys
    from rankwise.errors import WorkerRaisedError
    from tests.process import test_lost_causes as tasks

    kind = getattr(tasks, sys.argv[1])
    try:
        tasks.ddp("popen", "auto", timeout=60.0).launch(tasks.fail, kind)
    except WorkerRaisedError as error:
        tasks.check(error, kind)
        print("checked")
"""


@pytest.mark.parametrize("kind", [TextHangs, *(pytest.param(kind, marks=SOAK) for kind in KINDS[1:])])
def test_an_exception_of_a_script(kind: type[Exception], run_script: ScriptRunner) -> None:
    """The main process raises one whose class is in the way as one of a function."""
    result = run_script(RAISES, kind.__name__, env=IN_SCRIPTS, siblings=1)
    assert (result.returncode, result.stdout) == (0, "checked\n"), result


@pytest.mark.soak
@pytest.mark.parametrize("kind", [TextHangs, TextExits])
def test_an_exception_under_torchrun(kind: type[Exception], run_script: ScriptRunner) -> None:
    """The agent of torch and Python can print one whose text is in the way; all processes end."""
    script = str(run_script.write(RAISES))
    result = run_script.command([sys.executable, *TORCHRUN, script, kind.__name__], env=with_tests())
    assert result.returncode == 1, result
    assert f"{kind.__name__}: (its text could not be had)" in result.stderr, result
    assert result.elapsed < 60, result


def test_exceptions_that_led_to_another_are_printable() -> None:
    """An exception that cannot be printed can afterwards; its class is the same to `except`."""
    error = ValueError("outer")
    error.__cause__ = TextExits()
    make_printable(error)
    assert str(error) == "outer"
    assert isinstance(error.__cause__, TextExits)
    assert "TextExits: (its text could not be had)" in "".join(traceback.format_exception(error))


def fail(strategy: Any, kind: type[Exception]) -> None:
    if strategy.global_rank == 1:
        raise kind("the text")
    time.sleep(60)


class TwoArguments(Exception):
    """It can be pickled, but not read back."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(f"{first} and {second}")


class Raises:
    """It can be pickled, but not read back."""

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return operator.truediv, (1, 0)


@pytest.mark.parametrize(("strategy", "method"), FUNCTIONS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", ["exception", "other"])
def test_a_value_that_cannot_be_unpickled(value: str, rank: int, strategy: Create, method: str) -> None:
    """The rank that has returned it is named."""
    why = r"argument" if value == "exception" else "division by zero"
    with pytest.raises(WorkerRaisedError, match=rf"what it returned cannot be unpickled: .*{why}") as caught:
        strategy(method).launch(return_on_rank, rank, value)
    assert caught.value.global_rank == rank
    assert caught.value.pid != os.getpid()


def return_on_rank(strategy: Any, rank: int, value: str) -> object:
    if strategy.global_rank != rank:
        return None
    return TwoArguments(1, 2) if value == "exception" else Raises()


VALUE = """
    from tests.process import test_lost_causes as tasks

    strategy = tasks.ddp("popen")
    value = strategy.launch(tasks.return_on_rank, 1, "exception")
    if strategy.is_global_zero:
        print(value, strategy.results)
"""


def test_a_value_of_a_script_that_cannot_be_unpickled(run_script: ScriptRunner) -> None:
    """It stays with its rank, as one that cannot be pickled."""
    result = run_script(VALUE, env=IN_SCRIPTS, siblings=1)
    assert result.stdout == "None {0: None}\n", result


STORAGE = """
    import sys
    from rankwise.checkpoint import TorchCheckpointIO
    from rankwise.errors import CheckpointError
    from tests.process.test_lost_causes import TwoArguments, ddp, elastic

    class Locked(Exception):
        def __init__(self, *_):
            super().__init__("1 and 2")
            self.lock = sys.stdout

    class Storage(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path):
            raise checkpoint["error"](1, 2)

    def job(strategy):
        for error in (TwoArguments, Locked):
            try:
                strategy.save_checkpoint({"error": error}, "x.ckpt")
            except CheckpointError as caught:
                print(strategy.global_rank, str(caught).partition("\\n")[0], flush=True)

    if __name__ == "__main__":
        make, method = (elastic, "forkserver") if sys.argv[1] == "elastic" else (ddp, sys.argv[1])
        make(method, rendezvous="auto", checkpoint_io=Storage()).launch(job)
"""


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(name, marks=SOAK) for name in ("elastic", "torchrun"))]
)
def test_an_error_of_a_checkpoint_io(method: str, run_script: ScriptRunner) -> None:
    """Every rank raises the error of the rank that saves, also one that cannot be pickled, or read back."""
    command = [sys.executable, *(TORCHRUN if method == "torchrun" else ()), str(run_script.write(STORAGE))]
    method = "popen" if method == "torchrun" else method
    result = run_script.command([*command, method], env=IN_SCRIPTS, siblings=1)
    assert result.returncode == 0, result
    for rank in (0, 1):
        for name in ("TwoArguments", "Locked"):
            text = f"{rank} Checkpoint 'x.ckpt': could not be written: {name}: 1 and 2.\n"
            assert text in result.stdout, result


FAILS_AFTERWARDS = """
    import sys
    from rankwise.errors import WorkerError
    from rankwise.strategies import DDPStrategy

    class Value:
        def __reduce__(self):
            return sys.exit, (3,)

    def job(strategy):
        return Value() if strategy.global_rank == 1 else None

    if __name__ == "__main__":
        try:
            DDPStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1]).launch(job)
        except WorkerError as error:
            print(error)
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_is_no_cause(method: str, run_script: ScriptRunner) -> None:
    """Where the main process ends a job by itself, no rank is reported to have failed."""
    result = run_script(FAILS_AFTERWARDS, method, siblings=1)
    assert "JobStopped" not in result.stdout + result.stderr, result
    assert result.returncode == 3, result
