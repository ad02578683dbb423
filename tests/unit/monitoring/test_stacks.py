"""The stacks of all ranks, on stderr."""

from __future__ import annotations

import pytest

from rankwise.monitoring.heartbeat import MonitoredRank
from rankwise.monitoring.stacks import dump_stacks


def test_the_own_stacks(workers: list[MonitoredRank], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is this process shows its stacks there too."""
    dump_stacks(workers[:1], "a reason")
    title, _, stacks = capsys.readouterr().err.partition("\n")
    assert title == "rankwise: a reason; stacks of global_rank=0 (this process):"
    assert "in test_the_own_stacks" in stacks
