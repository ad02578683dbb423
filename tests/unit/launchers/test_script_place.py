"""A script that several processes run: this one's place, and what the next launch is refused."""

import os
from collections.abc import Iterator

import pytest

from rankwise.errors import LaunchRefusedError
from rankwise.launchers import script_place
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.script import ScriptLauncher
from rankwise.launchers.script_place import can_rerun
from rankwise.launchers.worker_main import InheritedContext
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy
from tests.helpers.raising import raises
from tests.unit.environments.variables import torchrun
from tests.unit.launchers.supervised import OPTIONS, Ends

RANKS = RankInfo(1, 1, 0, 2, 2, 1)
LAUNCHER = ScriptLauncher((RankInfo(0, 0, 0, 2, 2, 1), RANKS), OPTIONS)


@pytest.fixture
def rerun(ends: Ends) -> Iterator[InheritedContext]:
    """Return the rank of a script that was run again, as which this process counts; it has run a job."""
    context = InheritedContext(RANKS, {"RANK": "1"}, None, ends.channel, -1, jobs=1)
    script_place.running = context
    yield context
    script_place.running = None


def launch(launcher: ScriptLauncher, rendezvous: str = "private") -> None:
    def entry(worker: WorkerContext) -> None:
        pytest.fail("the job has begun")

    launcher.launch(entry, {}, rendezvous)


def test_a_process_that_runs_its_script_alone() -> None:
    """It has no place, and waits for other nodes only; its command decides whether it can be run again."""
    assert script_place.running is None
    assert script_place.script_place() is None
    assert not can_rerun()  # pytest's
    assert not LAUNCHER.has_other_ranks
    assert LAUNCHER.context_between_jobs() is None
    assert ScriptLauncher((RankInfo(0, 0, 0, 2, 1, 2),), OPTIONS).has_other_ranks


def test_a_process_of_a_script(rerun: InheritedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its ranks, whatever its variables say, and comes to the next launch with the others."""
    assert script_place.running is rerun
    assert script_place.script_place() == RANKS
    assert can_rerun()
    assert LAUNCHER.has_other_ranks
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # `bind` sets it
    for name, value in torchrun().items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy(accelerator="cpu", devices=2)
    assert (strategy.bind(), strategy.environment.name) == (RANKS, "local")


def test_the_context_between_two_jobs(rerun: InheritedContext, ends: Ends) -> None:
    """That of this rank, on its channel; none before the first job, or in a process that it has forked."""
    context = LAUNCHER.context_between_jobs()
    assert context is not None
    assert (context.ranks, context.channel, context.job) == (RANKS, ends.channel, 0)
    rerun.jobs = 0
    assert LAUNCHER.context_between_jobs() is None
    rerun.jobs, rerun.pid = 1, os.getppid()
    assert LAUNCHER.context_between_jobs() is None


def test_a_process_that_a_rank_has_forked_is_no_rank(rerun: InheritedContext) -> None:
    """It cannot take part in a job of the script."""
    rerun.pid = os.getppid()
    raises(LaunchRefusedError, "in a process that a rank has forked", launch, LAUNCHER)


def test_what_does_not_fit_the_script(rerun: InheritedContext) -> None:
    """Another number of processes, or a store that these processes do not have."""
    with pytest.raises(LaunchRefusedError, match=r"runs as 2 processes; it cannot go on as 1\."):
        launch(ScriptLauncher((RankInfo(),), OPTIONS))
    raises(LaunchRefusedError, "this script's processes meet privately", launch, LAUNCHER, "tcp")
    assert rerun.jobs == 1
