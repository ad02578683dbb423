"""An uncaught failure ends the script with the exit code of the rank that failed."""

import pytest

from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.helpers.shared import computed_once
from tests.process.helpers import module_runner

JOB = """
import atexit, gc, os, signal, sys, threading, time
import rankwise
from rankwise import Trainer, TrainingModule
from rankwise.errors import WorkerError
from rankwise.strategies import DDPElasticStrategy, DDPStrategy
import torch

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

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

class Failing(TrainingModule):
    def __init__(self, how):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            fail(self.how)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def own_hook(kind, value, traceback):
    say("own hook", kind.__name__)

def strategy_of(method):
    if method == "elastic":
        return DDPElasticStrategy(accelerator="cpu", devices=2, max_restarts=0, start_method="fork")
    return DDPStrategy(accelerator="cpu", devices=2, start_method=method)

def run(method, how, way="launch"):
    main = os.getpid()
    atexit.register(lambda: say("exit hooks ran") if os.getpid() == main else None)
    if way == "fit":
        data = torch.utils.data.DataLoader(torch.ones(8, 1))
        Trainer(strategy=strategy_of(method), max_epochs=1, logger=False).fit(Failing(how), data)
    elif way == "caught":
        before = sys.excepthook
        try:
            strategy_of(method).launch(job, how)
        except WorkerError:
            pass
        gc.collect()
        say("as before:", sys.excepthook is before)
        raise ValueError("another")
    elif way == "own hook":
        sys.excepthook = own_hook
        strategy_of(method).launch(job, how)
    elif way == "interactive":
        sys.ps1 = ">>> "
        strategy_of(method).launch(job, how)
    elif way == "thread":
        thread = threading.Thread(target=strategy_of(method).launch, args=(job, how))
        thread.start()
        thread.join()
        say("as before:", sys.excepthook is sys.__excepthook__)
    else:
        strategy_of(method).launch(job, how)
"""

# Every case in a fork of one script that has imported all: it fails as a script of its own would.
ALL = (
    JOB
    + """
from rankwise.processes.fork_safety import import_dynamo

if __name__ == "__main__":
    import_dynamo()
    gc.freeze()  # what is there already need not be searched by each when it ends
    for case in sys.argv[1:]:
        say("case", case)
        sys.stderr.write(f"case {case}\\n")
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            break
        say("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        sys.exit()
    run("fork", *case.split("/"))
"""
)

ONE = (
    JOB
    + """
if __name__ == "__main__":
    run(*sys.argv[1:])
"""
)

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


class Outputs:
    """What each case has printed."""

    def __init__(self, result: ScriptResult) -> None:
        assert result.returncode == 0, result
        self.stdout, self.stderr = (
            dict(part.split("\n", 1) for part in text.split("case ")[1:])
            for text in (result.stdout, result.stderr)
        )


@pytest.fixture
@computed_once
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Run all cases."""
    with module_runner(tmp_path_factory.mktemp("codes")) as runner:
        return Outputs(runner(ALL, *CODES, timeout=180))


@pytest.mark.parametrize("case", CODES)
def test_the_code_is_the_culprits(case: str, outputs: Outputs) -> None:
    """The exit code is the failed rank's; exit hooks have run, the error is printed."""
    assert f"code {CODES[case]}\n" in outputs.stdout[case], outputs.stdout
    assert "exit hooks ran" in outputs.stdout[case]
    if "own hook" not in case and "caught" not in case:
        assert outputs.stderr[case].count("Worker global_rank=1 ") == 1


def test_ones_own_excepthook_is_called(outputs: Outputs) -> None:
    """The script's own `sys.excepthook` prints the error, and nothing else is printed."""
    assert "own hook WorkerExitedError" in outputs.stdout["_exit/own hook"]
    assert outputs.stderr["_exit/own hook"] == ""


@pytest.mark.parametrize("case", ["kill/caught", "_exit/thread"])
def test_what_is_caught_leaves_no_hook(case: str, outputs: Outputs) -> None:
    """`sys.excepthook` is restored when the error is caught, and never changes in a thread."""
    assert "as before: True" in outputs.stdout[case]


@pytest.mark.parametrize(
    ("method", "how", "way", "code"),
    [
        ("popen", "kill", "fit", 137),
        pytest.param("popen", "_exit", "launch", 3, marks=pytest.mark.soak),
        pytest.param("spawn", "_exit", "fit", 3, marks=pytest.mark.soak),
        pytest.param("forkserver", "kill", "launch", 137, marks=pytest.mark.soak),
        pytest.param("elastic", "_exit", "launch", 3, marks=pytest.mark.soak),
    ],
)
def test_other_ways_to_start(method: str, how: str, way: str, code: int, run_script: ScriptRunner) -> None:
    """The same for the other start methods, with the Trainer and without."""
    running = run_script.start(ONE, method, how, way, fresh=True)
    result = running.finish(timeout=180, leftover_grace_s=20)  # a forkserver takes its time to unload torch
    assert result.returncode == code, result
    assert result.stderr.count("Worker global_rank=1 ") == 1, result
    assert "exit hooks ran" in result.stdout
