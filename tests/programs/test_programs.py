"""Property: N ranks give the parameters, state and metrics of a hand-written loop of one process."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests
from tests.programs import script
from tests.programs.comparing import check, check_forked, check_written
from tests.programs.drawing import programs
from tests.programs.program import Action, Change, Data, Job, Learning, Options, Program, Run
from tests.programs.ranks import ranks_of_many_sizes

ANY = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
FEW = settings(ANY, max_examples=10, derandomize=True)
MANY = settings(ANY, max_examples=500)
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


def check_programs(options: settings, folder: Path) -> None:
    """Draw programs, and check each on ranks that exist for all of them."""
    with ranks_of_many_sizes(folder) as ranks_of:

        @options
        @given(programs())
        def check_one(program: Program) -> None:
            check(program, ranks_of, folder)

        check_one()


def test_programs_equal_a_loop_by_hand(tmp_path: Path) -> None:
    """Parameters, buffers, optimizer state, metrics and predictions are those of one process, to 1e-12."""
    check_programs(FEW, tmp_path)


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_have_failed(name: str, tmp_path: Path) -> None:
    """The same for programs in which a defect was found."""
    with ranks_of_many_sizes(tmp_path) as ranks_of:
        check(FOUND[name], ranks_of, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_programs_equal_a_loop_by_hand(tmp_path: Path) -> None:
    """The same for 500 programs, which differ from run to run unless --hypothesis-seed is given."""
    check_programs(MANY, tmp_path)


def check_forked_programs(options: settings, folder: Path) -> None:
    """Draw programs whose stages run in ranks that the calling process forks for each."""

    @options
    @given(programs((2, 3), shuffles=False, draws=False))
    def check_one(program: Program) -> None:
        check_forked(program, folder)

    check_one()


def test_state_comes_back_to_the_caller(tmp_path: Path) -> None:
    """The same where each stage runs in forked processes, of the process that has called it."""
    check_forked_programs(settings(FEW, max_examples=3), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_state_comes_back_to_the_caller_again_and_again(tmp_path: Path) -> None:
    """The same for 60 programs."""
    check_forked_programs(settings(MANY, max_examples=60), tmp_path)


def check_scripts(options: settings, launcher: str, folder: Path, run_script: ScriptRunner) -> None:
    """Draw programs, and check each in the processes of one script."""
    drawn: list[Program] = []

    @options
    @given(programs((2,)))
    def draw_one(program: Program) -> None:
        drawn.append(replace(program, jobs=program.jobs[:1]))

    draw_one()
    (folder / "programs.pkl").write_bytes(pickle.dumps(drawn))
    command = [sys.executable, *LAUNCHERS[launcher], str(Path(script.__file__)), str(folder)]
    result = run_script.command(command, env=with_tests(), timeout=60 + 10 * len(drawn), siblings=2)
    assert result.returncode == 0, result
    for number, program in enumerate(drawn):
        check_written(program, folder / str(number))


@pytest.mark.parametrize("launcher", ["ddp", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_processes_of_a_script_equal_a_loop_by_hand(
    launcher: str, tmp_path: Path, run_script: ScriptRunner
) -> None:
    """The same in processes that remain between the stages: of a script that is run again, or of torchrun."""
    check_scripts(settings(FEW, max_examples=3), launcher, tmp_path, run_script)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_a_script_again_and_again(
    launcher: str, tmp_path: Path, run_script: ScriptRunner
) -> None:
    """The same for 60 programs."""
    check_scripts(settings(MANY, max_examples=60), launcher, tmp_path, run_script)
