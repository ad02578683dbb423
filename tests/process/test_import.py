"""What importing rankwise does, and what it does not."""

from __future__ import annotations

from tests.helpers.scripts import ScriptRunner

COLLECTIONS = """
    import gc
    import torch
    from rankwise import errors

    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"] == 2))
    from rankwise import Trainer
    print("full collections", sum(seen), "enabled", gc.isenabled())
    gc.disable()
    from rankwise import StrategyRegistry, DDPStrategy
    print("disabled", not gc.isenabled())
"""


def test_no_full_collection_while_importing(run_script: ScriptRunner) -> None:
    """Torch's objects are not walked by the garbage collector meanwhile, whose setting stays as it was."""
    result = run_script(COLLECTIONS)
    assert result.stdout.splitlines() == ["full collections 0 enabled True", "disabled True"], result
