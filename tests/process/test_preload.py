"""What the forkserver imports."""

import gc

import pytest

from rankwise.strategies import DDPStrategy, Strategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp

READ = """
    import gc, sys
    import rankwise.launchers.preload
    print(gc.get_freeze_count())
    sys.exit(3)
"""


@pytest.mark.soak
def test_who_only_reads_it_is_left_alone(run_script: ScriptRunner) -> None:
    """Importing the preload module does not change the exit code of a process, whatever its arguments."""
    result = run_script(READ, "--start", "multiprocessing.forkserver", fresh=True)
    assert (result.stdout, result.returncode) == ("0\n", 3), result


def searches_strategies(strategy: Strategy) -> bool:
    return any(each is DDPStrategy for each in gc.get_objects())


def test_ranks_find_rankwise_imported() -> None:
    """The server has what the caller has imported, frozen; what a rank imports itself is not."""
    strategy = ddp("forkserver")
    strategy.launch(searches_strategies)
    assert strategy.results == {0: False, 1: False}
