"""Variables and files of a launcher that are of another kind than expected: an error, and no wait."""

import os
from pathlib import Path

import pytest

from rankwise.environments import detect_environment
from rankwise.environments.slurm import warn_of_unused_tasks
from rankwise.errors import EnvironmentVariableError
from rankwise.ranks import set_rank_zero_only
from rankwise.stores import rendezvous
from tests.unit.environments import variables


@pytest.mark.parametrize("text", ["9" * 5000, "first", "\u00b2", "\u0663", "-1", "1.5"], ids=ascii)
def test_numbers_of_other_kinds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no whole number in ASCII digits counts as no rank and no task, and is no restart."""
    warn_of_unused_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": text}, 1)
    monkeypatch.setenv("RANK", text)
    before = set_rank_zero_only(None)
    assert set_rank_zero_only(before) == 0
    monkeypatch.setattr(rendezvous, "_noted", None)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert rendezvous.current_restart().number == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    with pytest.raises(EnvironmentVariableError, match="TORCHELASTIC_RESTART_COUNT is not a number"):
        rendezvous.current_restart()


def test_a_pipe_in_place_of_a_file_of_nodes(tmp_path: Path) -> None:
    """It is not opened, which would wait for a writer."""
    os.mkfifo(tmp_path / "nodes")
    environ = {**variables.jsrun(), "LSB_DJOB_RANKFILE": str(tmp_path / "nodes")}
    with pytest.raises(EnvironmentVariableError, match="LSB_DJOB_RANKFILE names no node"):
        detect_environment(environ).environment.main_address  # noqa: B018  reading it is the test
