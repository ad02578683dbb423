"""The stacks of all ranks, on stderr."""

from __future__ import annotations

import pytest

from rankwise.launchers._member import Member
from rankwise.launchers._stacks import dump_stacks


def test_the_own_stacks(members: list[Member], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is this process shows its stacks there too."""
    dump_stacks(members[:1], "a reason")
    title, _, stacks = capsys.readouterr().err.partition("\n")
    assert title == "rankwise: a reason; stacks of global_rank=0 (this process):"
    assert "in test_the_own_stacks" in stacks
