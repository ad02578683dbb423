"""What importing rankwise does, and what it does not."""

from tests.helpers.scripts import ScriptRunner

SCRIPT = """
    import sys
    from lightning_utilities.core.rank_zero import rank_zero_only
    from rankwise import DDPStrategy, Trainer

    print(rank_zero_only.rank, {"pstats", "rankwise.compatibility.lightning_classes"} & {*sys.modules})
"""


def test_importing_rankwise(run_script: ScriptRunner) -> None:
    """It tells lightning-utilities the rank; what few programs need is not imported before it is used."""
    assert run_script(SCRIPT, env={"RANK": "3"}, fresh=True).stdout == "3 set()\n"
