"""What the forkserver imports."""

from __future__ import annotations

from tests.helpers.scripts import ScriptRunner

READ = """
    import gc, sys
    import rankwise.launchers.preload
    print(gc.get_freeze_count())
    sys.exit(3)
"""


def test_who_only_reads_it_is_left_alone(run_script: ScriptRunner) -> None:
    """Importing the preload module in another process does not change its exit code."""
    result = run_script(READ)
    assert (result.stdout, result.returncode) == ("0\n", 3), result
