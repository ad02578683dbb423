"""RankInfo: it says who one is of how many, and refuses what cannot be; `rank_zero_only` is kept in step."""

import dataclasses
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Trainer, TrainingModule
from rankwise.errors import InvalidArgumentError
from rankwise.ranks import RankInfo, rank_zero_only, set_rank_zero_only, warn

THIRD_OF_FOUR = RankInfo(2, 0, 1, world_size=4, local_world_size=2, num_nodes=2)


def test_who_of_how_many() -> None:
    """One process is the default; the repr can be read in a log; a node's first process is not the job's."""
    info = RankInfo()
    assert dataclasses.astuple(info) == (0, 0, 0, 1, 1, 1)
    assert info.is_global_zero
    assert info.is_one_node
    assert repr(THIRD_OF_FOUR) == "RankInfo(global_rank 2 of 4, local_rank 0 of 2, node 1 of 2)"
    assert not THIRD_OF_FOUR.is_global_zero
    assert not THIRD_OF_FOUR.is_one_node
    # Three processes on two nodes: the numbers need not be multiples of one another.
    assert RankInfo(2, 0, 1, world_size=3, local_world_size=1, num_nodes=2).world_size == 3


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [
        *(({"global_rank": 4}, "global_rank"), ({"global_rank": -1}, "global_rank")),
        *(({"local_rank": 2}, "local_rank"), ({"local_rank": -1}, "local_rank")),
        *(({"node_rank": 2}, "node_rank"), ({"node_rank": -1}, "node_rank")),
        *(({"world_size": 0}, "global_rank"), ({"local_world_size": 5}, "world_size")),
        ({"num_nodes": 5}, "world_size"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, int], argument: str) -> None:
    """Numbers that contradict each other are an error that shows all of them."""
    with pytest.raises(InvalidArgumentError, match=f"^{argument}=.*RankInfo\\(global_rank ") as caught:
        dataclasses.replace(THIRD_OF_FOUR, **wrong)
    assert caught.value.argument == argument


def test_equal_places_are_equal() -> None:
    """It is a value: it compares, hashes and pickles as one, and cannot be changed."""
    copy = pickle.loads(pickle.dumps(THIRD_OF_FOUR))
    assert copy == THIRD_OF_FOUR
    assert hash(copy) == hash(THIRD_OF_FOUR)
    with pytest.raises(dataclasses.FrozenInstanceError):
        THIRD_OF_FOUR.global_rank = 0  # type: ignore[misc]  # the point of the test


def test_rank_zero_only_follows() -> None:
    """A decorated function runs on rank zero only, and the rank before comes back."""

    @rank_zero_only
    def who() -> str:
        return "rank zero"

    before = set_rank_zero_only(1)
    try:
        assert who() is None
        assert set_rank_zero_only(0) == 1
        assert who() == "rank zero"
    finally:
        set_rank_zero_only(before)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "2"}, 2),
        ({"RANK": "not a number", "LOCAL_RANK": "1"}, 1),
    ],
)
def test_rank_zero_only_reads_the_environment(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody has set a rank, a launcher's variables tell it."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = set_rank_zero_only(None)
    assert set_rank_zero_only(before) == rank


class Untrained(TrainingModule):
    """Has no optimizer, and a step that warns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def configure_optimizers(self) -> None:
        """Train nothing."""

    def training_step(self, batch: object, batch_idx: int) -> None:
        """Warn as a library that this calls would."""
        rank_zero_only(warn)("in a hook")


def test_warnings_name_the_users_line() -> None:
    """Not rankwise's, nor that of torch or of a decorator between: the call of fit, or the line in a hook."""
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Untrained(), DataLoader(TensorDataset(torch.ones(1))))
    lines = Path(__file__).read_text().splitlines()
    places = {str(each.message): (each.filename, lines[each.lineno - 1].strip()) for each in caught}
    assert places == {
        "Untrained.configure_optimizers() returned no optimizer: nothing is trained.": (
            __file__,
            "trainer.fit(Untrained(), DataLoader(TensorDataset(torch.ones(1))))",
        ),
        "in a hook": (__file__, 'rank_zero_only(warn)("in a hook")'),
    }
