"""What importing rankwise does, and what it does not."""

from tests.helpers.scripts import ScriptRunner

COLLECTIONS = """
    import gc
    import torch
    from rankwise import errors

    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    from rankwise import Trainer
    print("collections", len(seen), "enabled", gc.isenabled())
    gc.disable()
    from rankwise import StrategyRegistry, DDPStrategy
    print("disabled", not gc.isenabled())
"""


def test_no_collection_while_importing(run_script: ScriptRunner) -> None:
    """No objects are walked by the garbage collector meanwhile, whose setting stays as it was."""
    result = run_script(COLLECTIONS, fresh=True)
    assert result.stdout.splitlines() == ["collections 0 enabled True", "disabled True"], result


LATER = """
    import sys
    from rankwise import DDPStrategy, Trainer

    used_later = {"lightning_utilities", "pstats", "rankwise.compatibility.lightning_classes"}
    print(used_later & {*sys.modules})
    from rankwise import rank_zero_info, rank_zero_only
    from lightning_utilities.core import rank_zero

    print(rank_zero_info is rank_zero.rank_zero_info, rank_zero_only is rank_zero.rank_zero_only)
    print("rank", rank_zero_only.rank)
"""


def test_what_few_programs_need_is_imported_when_used(run_script: ScriptRunner) -> None:
    """The functions of lightning-utilities are its own, and have the launcher's rank then."""
    result = run_script(LATER, env={"RANK": "3"}, fresh=True)
    assert result.stdout.splitlines() == ["set()", "True True", "rank 3"], result


def test_lightning_utilities_that_is_imported_already_gets_the_rank(run_script: ScriptRunner) -> None:
    """Its functions work before there is a job, as rankwise's names for them do."""
    code = """
        from lightning_utilities.core.rank_zero import rank_zero_only
        from rankwise import Trainer

        print(rank_zero_only.rank)
    """
    assert run_script(code, env={"RANK": "3"}, fresh=True).stdout == "3\n"
