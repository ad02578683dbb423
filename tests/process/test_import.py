"""What importing rankwise does, and what it does not."""

from tests.helpers.scripts import ScriptRunner


def test_lightning_utilities_gets_the_rank(run_script: ScriptRunner) -> None:
    """Its functions work before there is a job, as rankwise's names for them do."""
    code = """
        from lightning_utilities.core.rank_zero import rank_zero_only
        from rankwise import Trainer

        print(rank_zero_only.rank)
    """
    assert run_script(code, env={"RANK": "3"}, fresh=True).stdout == "3\n"


def test_what_few_programs_need_is_imported_when_used(run_script: ScriptRunner) -> None:
    """What adapts the classes of other libraries, and the standard library's profilers."""
    code = """
        import sys
        from rankwise import DDPStrategy, Trainer

        print({"pstats", "rankwise.compatibility.lightning_classes"} & {*sys.modules})
    """
    assert run_script(code, fresh=True).stdout == "set()\n"
