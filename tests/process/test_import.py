"""What importing rankwise does, and what it does not."""

from tests.helpers.scripts import ScriptRunner

SCRIPT = """
    import sys
    from lightning_utilities.core.rank_zero import rank_zero_only
    from rankwise import DDPStrategy, Trainer

    print(rank_zero_only.rank, {"pstats", "rankwise.compatibility.lightning_classes"} & {*sys.modules})
"""

COLLECTIONS = """
    import gc
    import torch

    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    from rankwise import Trainer
    print(seen.count("start"), gc.isenabled())
"""


def test_importing_rankwise(run_script: ScriptRunner) -> None:
    """It tells lightning-utilities the rank, and imports what most programs need; garbage waits."""
    assert run_script(SCRIPT, env={"RANK": "3"}, fresh=True).stdout == "3 set()\n"
    assert run_script(COLLECTIONS, fresh=True).stdout == "1 True\n"
