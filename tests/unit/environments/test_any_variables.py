"""For any variables the result is an environment or one of rankwise's own errors."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwise.environments import detect_environment
from rankwise.environments.slurm import warn_of_unused_tasks
from rankwise.errors import EnvironmentVariableError, RankwiseError
from rankwise.ranks import set_rank_zero_only
from rankwise.stores.restart import current_restart
from tests.unit.environments import variables

LAUNCHERS = (
    *(variables.torchrun(), variables.step(), variables.batch(), variables.open_mpi(3, 4, 1, 2)),
    *(variables.hydra(), variables.jsrun(3, 4, 2), variables.pals(), variables.pod(), variables.plain()),
    variables.by_hand(),
)
NAMES = sorted({name for launcher in LAUNCHERS for name in launcher})
TEXTS = st.one_of(
    st.sampled_from(["", " ", "0", "1", "2", "3", "-1", "x", "1,2", "2(x3),1", "n[1-", "n[1-2]", "\x00"]),
    st.sampled_from(
        ["9" * 40, "1(x999999999)", "n[1-999999999]", "\u0661", "4294967295", "1.0", "/", "/dev/null"]
    ),
    st.text(max_size=12),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(LAUNCHERS), st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=6), st.booleans())
def test_any_variables(launcher: dict[str, str], damage: dict[str, str], is_alone: bool) -> None:
    """A launcher's variables with any change cause no bare KeyError or ValueError."""
    environ = damage if is_alone else {**launcher, **damage}
    try:
        environment = detect_environment(environ).environment
        is_asking = environment.name == "mpi" and environment.num_nodes > 1  # mpi4py, which would start a job
        port = 1 if is_asking else environment.main_port
        if environment.num_nodes > 1 and not is_asking:
            environment.main_address  # noqa: B018  reading it is the test
    except RankwiseError:
        return
    ranks = environment.ranks
    assert 0 <= ranks.global_rank < ranks.world_size
    assert 1 <= port <= 65535


@pytest.mark.parametrize("text", ["9" * 5000, "\u00b2", "\u0663", "-1", "1.5"], ids=ascii)
def test_numbers_of_other_kinds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no whole number in ASCII digits counts as no rank and no task, and is no restart."""
    warn_of_unused_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": text}, 1)
    monkeypatch.setenv("RANK", text)
    before = set_rank_zero_only(None)
    assert set_rank_zero_only(before) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    with pytest.raises(EnvironmentVariableError, match="TORCHELASTIC_RESTART_COUNT is not a number"):
        current_restart()


def test_a_pipe_in_place_of_a_file_of_nodes(tmp_path: Path) -> None:
    """It is not opened, which would wait for a writer."""
    os.mkfifo(tmp_path / "nodes")
    environ = {**variables.jsrun(), "LSB_DJOB_RANKFILE": str(tmp_path / "nodes")}
    with pytest.raises(EnvironmentVariableError, match="LSB_DJOB_RANKFILE names no node"):
        detect_environment(environ).environment.main_address  # noqa: B018  reading it is the test
