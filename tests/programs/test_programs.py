"""Property: N ranks give the parameters, state and metrics of a hand-written loop of one process."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests
from tests.programs import script
from tests.programs.comparing import check, check_forked, check_written, differences
from tests.programs.drawing import programs
from tests.programs.loops import Loop, loops, run_by_hand, run_on_rank
from tests.programs.program import Action, Change, Data, Job, Learning, Options, Program, Run
from tests.programs.ranks import ranks_of_many_sizes

ANY = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
FIT = Run((Action("fit"),))
RESUMING = replace(FIT, resumes=True)


def program(train: Data, jobs: tuple[Job, ...], options: Options | None = None, **more: Any) -> Program:
    return Program(0, train, Data(4, 1, seed=10), Learning(), options or Options(), jobs, **more)


FOUND = {  # programs that have failed once
    "a validation before a fit, with a metric object": program(
        Data(2, 1), (Job(1, (Run((Action("validate"), Action("fit"))),)),), metrics=("mse",)
    ),
    "more ranks continue within an epoch, and some have no batch left": program(
        Data(34, 4, drop_last=True),
        (Job(1, (FIT,)), Job(3, (RESUMING,))),
        Options(accumulate=3, uneven_inputs="join", save_every_n_steps=2),
    ),
    "a layer is frozen in a window that turns out to be shorter than the others": program(
        Data(6, 2, kind="iterable"),
        (Job(1, (FIT,)), Job(2, (FIT,))),
        Options(accumulate=3, weighting=None),
        changes=(Change(0, 1, "freeze", "body"),),
    ),
}
LAUNCHERS = {"ddp": [], "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}


def series(*, few: int, many: int) -> pytest.MarkDecorator:
    """Run a test with a few examples, and with many, which differ from run to run, in the series `soak`."""
    marks = [pytest.mark.soak, pytest.mark.timeout(3600)]
    long = pytest.param(settings(ANY, max_examples=many), id=str(many), marks=marks)
    short = pytest.param(settings(ANY, max_examples=few, derandomize=True), id=str(few))
    return pytest.mark.parametrize("options", [short, long])


def for_each(drawn: SearchStrategy[Any], check_one: Callable[[Any], None], options: settings) -> None:
    """Check each of what hypothesis draws."""
    options(given(drawn)(check_one))()


@series(few=1, many=500)
def test_programs_equal_a_loop_by_hand(options: settings, tmp_path: Path) -> None:
    """Parameters, buffers, optimizer state, metrics and predictions are those of one process, to 1e-12."""
    with ranks_of_many_sizes(tmp_path) as ranks_of:
        for_each(programs(), lambda program: check(program, ranks_of, tmp_path), options)


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_have_failed(name: str, tmp_path: Path) -> None:
    """The same for programs in which a defect was found."""
    with ranks_of_many_sizes(tmp_path) as ranks_of:
        check(FOUND[name], ranks_of, tmp_path)


@series(few=1, many=60)
def test_state_comes_back_to_the_caller(options: settings, tmp_path: Path) -> None:
    """The same where each stage runs in forked processes, of the process that has called it."""
    drawn = programs((2, 3), shuffles=False, draws=False)
    for_each(drawn, lambda program: check_forked(program, tmp_path), options)


@series(few=3, many=60)
@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["ddp", "torchrun"])
def test_processes_of_a_script_equal_a_loop_by_hand(
    options: settings, launcher: str, tmp_path: Path, run_script: ScriptRunner
) -> None:
    """The same in processes that remain between the stages: of a script that is run again, or of torchrun."""
    drawn: list[Program] = []
    for_each(programs((2,)), lambda program: drawn.append(replace(program, jobs=program.jobs[:1])), options)
    (tmp_path / "programs.pkl").write_bytes(pickle.dumps(drawn))
    command = [sys.executable, *LAUNCHERS[launcher], str(Path(script.__file__)), str(tmp_path)]
    result = run_script.command(command, env=with_tests(), timeout=60 + 10 * len(drawn), siblings=2)
    assert result.returncode == 0, result
    for number, program in enumerate(drawn):
        check_written(program, tmp_path / str(number))


@series(few=10, many=500)
def test_loops_equal_one_process(options: settings, tmp_path: Path) -> None:
    """Without a Trainer, parameters and optimizer state of one to three modules are those of one process."""

    def check_one(loop: Loop) -> None:
        expected = run_by_hand(loop)
        for rank, found in enumerate(ranks_of(loop.world_size).run(run_on_rank, loop)):
            assert differences(found, expected, f"rank {rank}") == []

    with ranks_of_many_sizes(tmp_path) as ranks_of:
        for_each(loops(), check_one, options)
