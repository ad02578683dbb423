"""An uncaught failure ends the script with the exit code of the rank that failed."""

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

JOB = """
import atexit, gc, os, signal, sys, time
from rankwise.errors import WorkerError
from tests.process.host_cases import in_a_thread, strategy_of
from tests.process.training_tasks import Regression, loader, quiet_trainer

def fail(how):
    if how == "_exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("on purpose")
    sys.exit(int(how))

def job(strategy, how):
    strategy.barrier()
    if strategy.global_rank == 1:
        fail(how)
    time.sleep(30)

class Failing(Regression):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            fail(self.how)
        return super().training_step(batch, batch_idx)

def run(method, how, way):
    main, launch = os.getpid(), lambda: strategy_of(method).launch(job, how)
    atexit.register(lambda: print("exit hooks ran") if os.getpid() == main else None)
    if way == "fit":
        quiet_trainer(strategy_of(method), 2, max_epochs=1).fit(Failing(how), loader(8, 1))
    elif way == "caught":
        before = sys.excepthook
        try:
            launch()
        except WorkerError:
            pass
        gc.collect()
        print("as before:", sys.excepthook is before)
        raise ValueError("another")
    elif way == "thread":
        in_a_thread(launch)
        print("as before:", sys.excepthook is sys.__excepthook__)
    else:
        if way == "own hook":
            sys.excepthook = lambda kind, value, traceback: print("own hook", kind.__name__)
        if way == "interactive":
            sys.ps1 = ">>> "
        launch()


if __name__ == "__main__":
    run(*sys.argv[1:])
"""
CODES = {
    "_exit/launch": 3,
    "kill/launch": 137,
    "raise/launch": 1,
    "0/launch": 1,
    "-1/launch": 255,
    "5/fit": 5,
    "kill/fit": 137,
    "kill/caught": 1,
    "_exit/own hook": 3,
    "_exit/interactive": 1,
    "_exit/thread": 0,
}


@pytest.mark.parametrize("case", CODES)
def test_the_code_is_the_culprits(case: str, run_script: ScriptRunner) -> None:
    """The exit code is the failed rank's; exit hooks have run, the error is printed.

    A `sys.excepthook` of the script's own prints it instead. `sys.excepthook` is restored when the error is
    caught, and never changes in a thread.
    """
    result = run_script(JOB, "fork", *case.split("/"), env=with_tests())
    assert result.returncode == CODES[case], result
    assert "exit hooks ran" in result.stdout
    if "own hook" in case:
        assert ("own hook WorkerExitedError" in result.stdout, result.stderr) == (True, ""), result
    elif "caught" not in case:
        assert result.stderr.count("Worker global_rank=1 ") == 1, result
    if case in ("kill/caught", "_exit/thread"):
        assert "as before: True" in result.stdout, result


@pytest.mark.parametrize(
    ("method", "how", "way", "code"),
    [
        ("popen", "kill", "fit", 137),
        pytest.param("popen", "_exit", "launch", 3, marks=pytest.mark.soak),
        pytest.param("spawn", "_exit", "fit", 3, marks=pytest.mark.soak),
        pytest.param("forkserver", "kill", "launch", 137, marks=pytest.mark.soak),
        pytest.param("elastic-fork", "_exit", "launch", 3, marks=pytest.mark.soak),
    ],
)
def test_other_ways_to_start(method: str, how: str, way: str, code: int, run_script: ScriptRunner) -> None:
    """The same for the other start methods, with the Trainer and without."""
    siblings = int(method == "popen")
    running = run_script.start(JOB, method, how, way, env=with_tests(), fresh=not siblings, siblings=siblings)
    result = running.finish(timeout=180, leftover_grace_s=20)  # a forkserver takes its time to unload torch
    assert result.returncode == code, result
    assert result.stderr.count("Worker global_rank=1 ") == 1, result
    assert "exit hooks ran" in result.stdout
