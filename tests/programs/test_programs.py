"""Property: N ranks give the parameters, state and metrics of a hand-written loop of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.programs.comparing import check, check_forked
from tests.programs.drawing import programs
from tests.programs.program import Program
from tests.programs.ranks import ranks_of_many_sizes

ANY = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
FEW = settings(ANY, max_examples=20, derandomize=True)
MANY = settings(ANY, max_examples=500)


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


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_programs_equal_a_loop_by_hand(tmp_path: Path) -> None:
    """The same for 500 programs, which differ from run to run unless --hypothesis-seed is given."""
    check_programs(MANY, tmp_path)


def check_forked_programs(options: settings, folder: Path) -> None:
    """Draw programs whose stages run in ranks that the calling process forks for each."""

    @options
    @given(programs((2, 3), shuffles=False))
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
