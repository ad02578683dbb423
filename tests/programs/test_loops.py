"""Property: a random loop without a Trainer, on N ranks, trains what the same loop of one process trains."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.programs.comparing import differences
from tests.programs.loops import Loop, loops, run_by_hand, run_on_rank
from tests.programs.ranks import ranks_of_many_sizes
from tests.programs.test_programs import FEW, MANY


def check_loops(options: settings, folder: Path) -> None:
    """Draw loops, and check each on ranks that exist for all of them."""
    with ranks_of_many_sizes(folder) as ranks_of:

        @options
        @given(loops())
        def check_one(loop: Loop) -> None:
            expected = run_by_hand(loop)
            for rank, found in enumerate(ranks_of(loop.world_size).run(run_on_rank, loop)):
                assert differences(found, expected, f"rank {rank}") == []

        check_one()


def test_loops_equal_one_process(tmp_path: Path) -> None:
    """Parameters and optimizer state of one to three modules are those of one process, to 1e-12."""
    check_loops(FEW, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_loops_equal_one_process(tmp_path: Path) -> None:
    """The same for 500 loops."""
    check_loops(MANY, tmp_path)
