"""What ended a job is reported, whatever exceptions and values are made of."""

import operator
import os
import sys
import time
import traceback
from typing import Any

import pytest

from rankwise.errors import WorkerRaisedError
from rankwise.failures.classify import make_printable
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import TORCHRUN, Calls, in_scripts, with_tests
from tests.process.host_cases import strategy_of
from tests.process.test_host_programs import METHODS

SOAK = pytest.mark.soak


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


OTHERS = ("elastic-fork", "elastic-spawn", "spawn", "forkserver")
FUNCTIONS = ["fork", *(pytest.param(method, marks=SOAK) for method in OTHERS)]
"""What runs a function in other processes than the caller's."""

KINDS = [TextHangs, TextExits, NoAttributes, NoDictionary, Caused]


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_whose_class_is_in_the_way(kind: type[Exception], method: str) -> None:
    """The rank and the type are reported, and where it was raised."""
    with pytest.raises(WorkerRaisedError) as caught:
        strategy_of(method, timeout=60.0).launch(fail, kind)
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
        tasks.strategy_of("popen", timeout=60.0).launch(tasks.fail, kind)
    except WorkerRaisedError as error:
        tasks.check(error, kind)
        print("checked")
"""


@pytest.mark.parametrize("kind", [TextHangs, *(pytest.param(kind, marks=SOAK) for kind in KINDS[1:])])
def test_an_exception_of_a_script(kind: type[Exception], run_script: ScriptRunner) -> None:
    """The main process raises one whose class is in the way as one of a function."""
    result = run_script(RAISES, kind.__name__, env=in_scripts(), siblings=1)
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


VALUES = {
    "exception": TwoArguments(1, 2),
    "other": Calls(operator.truediv, (1, 0)),
    "exit": Calls(sys.exit, (3,)),
}


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", ["exception", "other"])
def test_a_value_that_cannot_be_unpickled(value: str, rank: int, method: str) -> None:
    """The rank that has returned it is named."""
    why = r"argument" if value == "exception" else "division by zero"
    with pytest.raises(WorkerRaisedError, match=rf"what it returned cannot be unpickled: .*{why}") as caught:
        strategy_of(method).launch(return_on_rank, rank, value)
    assert caught.value.global_rank == rank
    assert caught.value.pid != os.getpid()


def return_on_rank(strategy: Any, rank: int, value: str) -> object:
    return VALUES[value] if strategy.global_rank == rank else None


VALUE = """
    import sys
    from rankwise.errors import WorkerError
    from tests.process import test_lost_causes as tasks

    if __name__ == "__main__":
        strategy = tasks.strategy_of(sys.argv[1])
        try:
            value = strategy.launch(tasks.return_on_rank, 1, sys.argv[2])
        except WorkerError as error:
            value = error
        if strategy.is_global_zero:
            print(value, strategy.results)
"""


def test_a_value_of_a_script_that_cannot_be_unpickled(run_script: ScriptRunner) -> None:
    """It stays with its rank, as one that cannot be pickled."""
    result = run_script(VALUE, "popen", "exception", env=in_scripts(), siblings=1)
    assert result.stdout == "None {0: None}\n", result


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_is_no_cause(method: str, run_script: ScriptRunner) -> None:
    """Where the main process ends a job by itself, no rank is reported to have failed."""
    result = run_script(VALUE, method, "exit", env=in_scripts(), siblings=1)
    assert "JobStopped" not in result.stdout + result.stderr, result
    assert result.returncode == 3, result


STORAGE = """
    import sys
    from rankwise.checkpoint import TorchCheckpointIO
    from rankwise.errors import CheckpointError
    from tests.process.test_lost_causes import TwoArguments, strategy_of

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
        strategy_of(sys.argv[1], checkpoint_io=Storage()).launch(job)
"""


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(name, marks=SOAK) for name in ("elastic-forkserver", "torchrun"))]
)
def test_an_error_of_a_checkpoint_io(method: str, run_script: ScriptRunner) -> None:
    """Every rank raises the error of the rank that saves, also one that cannot be pickled, or read back."""
    command = [sys.executable, *(TORCHRUN if method == "torchrun" else ()), str(run_script.write(STORAGE))]
    method = "popen" if method == "torchrun" else method
    result = run_script.command([*command, method], env=in_scripts(), siblings=1)
    assert result.returncode == 0, result
    for rank in (0, 1):
        for name in ("TwoArguments", "Locked"):
            text = f"{rank} Checkpoint 'x.ckpt': could not be written: {name}: 1 and 2.\n"
            assert text in result.stdout, result
