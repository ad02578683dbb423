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
