"""An uncaught failure ends the script with the exit code of the rank that failed."""

from typing import Any

import pytest

from tests.helpers.parameters import first
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
    "fork/_exit/launch": 3,
    "fork/kill/launch": 137,
    "fork/raise/launch": 1,
    "fork/0/launch": 1,
    "fork/5/fit": 5,
    "fork/_exit/thread": 0,
    "popen/kill/fit": 137,
    "fork/-1/launch": 255,
    "fork/kill/fit": 137,
    "fork/kill/caught": 1,
    "fork/_exit/own hook": 3,
    "fork/_exit/interactive": 1,
    "popen/_exit/launch": 3,
    "spawn/_exit/fit": 3,
    "forkserver/kill/launch": 137,
    "elastic-fork/_exit/launch": 3,
}


@pytest.mark.parametrize(("case", "code"), first(5, CODES.items()))
def test_the_code_is_the_culprits(case: str, code: int, run_script: ScriptRunner) -> None:
    """The exit code is the failed rank's; exit hooks have run, the error is printed.

    A `sys.excepthook` of the script's own prints it instead. `sys.excepthook` is restored when the error is
    caught, and never changes in a thread.
    """
    method, how, way = case.split("/")
    start: dict[str, Any] = {"fork": {}, "popen": {"siblings": 1}}.get(method, {"fresh": True})
    # a forkserver takes its time to unload torch
    limits = {} if method == "fork" else {"timeout": 180, "leftover_grace_s": 20}
    result = run_script.start(JOB, method, how, way, env=with_tests(), **start).finish(**limits)
    assert result.returncode == code, result
    assert "exit hooks ran" in result.stdout
    if way == "own hook":
        assert ("own hook WorkerExitedError" in result.stdout, result.stderr) == (True, ""), result
    elif way != "caught":
        assert result.stderr.count("Worker global_rank=1 ") == 1, result
    if way in ("caught", "thread"):
        assert "as before: True" in result.stdout, result
