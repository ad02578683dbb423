"""Ranks that end a fit with different values fail the test, however their processes were started."""

import sys
from typing import Any

import pytest

from rankwise.callbacks import Callback
from rankwise.errors import RankMismatchError, WorkerRaisedError
from tests.helpers.scripts import ScriptRunner
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.helpers import TORCHRUN, ddp, with_tests
from tests.process.training_tasks import Drift, Regression, fit_one_step


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("parameter", "the values of parameter 'net.2.bias'"),
        ("buffer", "the values of buffer 'reductions'"),
        ("state", "exp_avg of parameter 0 of optimizer 0"),
    ],
)
def test_threads(what: str, name: str) -> None:
    """The error names what differs first."""
    modules = [Regression("adam"), Regression("adam")]  # threads have one generator of random numbers

    def fit(rank: int) -> None:
        fit_one_step(ThreadedStrategy(rank, 2), modules[rank], callbacks=[Drift(what)])

    with pytest.raises(RankMismatchError) as caught:
        run_ranks(2, fit)
    assert next(iter(caught.value.differences)) == name


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_started_processes(start_method: str) -> None:
    """The error reaches the process that has started the ranks."""
    with pytest.raises(WorkerRaisedError, match=r"RankMismatchError[^!]*parameter 'net\.2\.bias'"):
        fit_one_step(ddp(start_method), callbacks=[Drift()])


@pytest.mark.parametrize(
    "command", [(), pytest.param(TORCHRUN, marks=pytest.mark.soak)], ids=["ddp", "torchrun"]
)
def test_scripts(command: tuple[str, ...], run_script: ScriptRunner) -> None:
    """A script fails: its main process, and each that torchrun has started."""
    path = run_script.write("""
        from tests.process.training_tasks import Drift, fit_one_step

        fit_one_step("ddp", callbacks=[Drift()])
        """)
    result = run_script.command([sys.executable, *command, str(path)], env=with_tests(), siblings=2)
    assert result.returncode == 1, result
    assert "RankMismatchError: " in result.stderr, result
    assert "the values of parameter 'net.2.bias'" in result.stderr, result


class Gathered(Callback):
    """Keeps the value that `Drift` changes, of each rank."""

    biases: Any

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.biases = trainer.strategy.all_gather(module.net[2].bias.detach()).flatten().tolist()


@pytest.mark.ranks_may_differ("the test shows that the marker works")
@pytest.mark.parametrize(
    "start_method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
)
def test_not_compared(start_method: str) -> None:
    """A test with the marker may end with ranks that differ."""
    gathered = Gathered()
    fit_one_step(ddp(start_method), callbacks=[Drift(), gathered])
    first, second = gathered.biases
    assert second == pytest.approx(first + 1)
