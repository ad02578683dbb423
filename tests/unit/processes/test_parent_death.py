"""What ties the processes of a job to their rank, and what is left of it afterwards: nothing."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack

from rankwise.processes.parent_death import children_end_with_parent


def settings() -> dict[str, object]:
    return dict(vars(multiprocessing.current_process())["_config"])


def test_the_caller_keeps_no_tie() -> None:
    """A `Process` made in the block carries the tie, also in a block within; one made later does not."""
    before = settings()
    with children_end_with_parent():
        with children_end_with_parent():
            assert settings().keys() - before.keys() == {"rankwise"}
        assert "rankwise" in settings()
        made = multiprocessing.get_context("spawn").Process()
    assert "rankwise" in vars(made)["_config"]
    assert settings() == before


def test_blocks_of_several_threads() -> None:
    """They may end in any order: the last one unties."""
    before = settings()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(children_end_with_parent())
        second.enter_context(children_end_with_parent())
        first.close()
        assert settings().keys() - before.keys() == {"rankwise"}
    assert settings() == before
