"""Seeding everything."""

import gc
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

import rankwise
from rankwise import seed_everything
from rankwise.errors import InvalidArgumentError, InvalidTypeError
from rankwise.seed import RandomStreams, get_random_state, isolated_random_state
from tests.helpers.raising import raises


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_everything_is_seeded() -> None:
    """The same seed gives the same numbers of Python, NumPy and torch; another gives others."""
    with isolated_random_state(0):
        assert seed_everything(3, workers=True) == 3
        first = draws()
        seed_everything(3)
        assert draws() == first
        seed_everything(4)
        assert all(other != one for other, one in zip(draws(), first, strict=True))


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no seed be given before, neither here nor by a variable; restore all of it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(rankwise.seed, "_given", None)
    with isolated_random_state(0):
        yield


@pytest.mark.usefixtures("unseeded")
def test_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the variable's, or 0 with a warning; later the seed that was given before. It is not exported."""
    with pytest.warns(UserWarning, match="means the seed 0"):
        assert seed_everything() == 0
    assert seed_everything(7) == seed_everything() == 7
    monkeypatch.setattr(rankwise.seed, "_given", None)
    monkeypatch.setenv("PL_GLOBAL_SEED", "12")
    assert (seed_everything(), torch.initial_seed()) == (12, 12)
    seed = seed_everything(np.int64(3))
    assert (seed, type(seed)) == (3, int)
    assert os.environ["PL_GLOBAL_SEED"] == "12"
    monkeypatch.setattr(rankwise.seed, "_given", None)
    for text in ("one", "-1", str(2**32), "1.5"):
        monkeypatch.setenv("PL_GLOBAL_SEED", text)
        raises(InvalidArgumentError, f"PL_GLOBAL_SEED='{text}'", seed_everything)


@pytest.mark.usefixtures("unseeded")
def test_workers_always_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a loader draw numbers that the seed determines, with both values of the argument."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)  # torch would never restore it
    drawn = []
    for workers in (True, False):
        seed_everything(1, workers=workers)
        drawn.append([batch.tolist() for batch in DataLoader(Draws(), num_workers=1)])
    assert drawn[0] == drawn[1]


class Draws(Dataset[torch.Tensor]):
    """Has random numbers of torch, Python and NumPy."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draws())


@pytest.mark.usefixtures("unseeded")
def test_verbose(caplog: pytest.LogCaptureFixture) -> None:
    """The seed is logged, unless that is off; other values of the flags, and no seeds, are refused."""
    caplog.set_level(logging.INFO, logger="rankwise.seed")
    seed_everything(5)
    seed_everything(6, verbose=False)
    assert caplog.messages == ["The seed is 5."]
    for flag in ("workers", "verbose"):
        raises(InvalidTypeError, f"{flag}=None", seed_everything, 5, **{flag: None})
    for seed in (-1, 2**32):
        raises(InvalidArgumentError, "seed=", seed_everything, seed)
    wrong: list[Any] = ["3", 1.5, True]
    for seed in wrong:
        raises(InvalidTypeError, "a whole number", seed_everything, seed)


class Watched(torch.Generator):
    """Writes down whether garbage may be collected while torch has locked the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.collecting: list[bool] = []

    def get_state(self) -> torch.Tensor:
        self.collecting.append(gc.isenabled())
        return super().get_state()


def test_no_collection_while_a_generator_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection could wait for a thread that waits for torch's generator."""
    monkeypatch.setattr(torch, "default_generator", default := Watched())
    own = Watched()
    with isolated_random_state(0, own):
        pass
    assert (default.collecting, own.collecting) == ([False], [False])
    assert gc.isenabled()


def test_streams_within_each_other() -> None:
    """Own numbers go on where they were; within a block of one name, another draws from the outer one's."""
    streams, found = RandomStreams(), []
    with isolated_random_state(3):
        expected = [draws() for _ in range(3)]
    with (
        isolated_random_state(3),
        streams.shared("hook"),
    ):  # has no effect before ranks have their own streams
        first = draws()
        with streams.own():
            assert [first, draws(), draws()] == expected
    streams.part(5, torch.device("cpu"), lambda: (0, 1))
    with isolated_random_state(3):
        before = get_random_state(torch.device("cpu"))
        with streams.shared("hook"):
            draws()
            saved = streams.own_state(torch.device("cpu"))  # as a checkpoint does that a hook saves
    assert saved["torch"].equal(before.pop("torch"))
    assert {name: saved[name] for name in before} == before
    with isolated_random_state(3):
        found.append(draws())
        with streams.shared("outer"):
            outer = [draws()]
            with streams.shared("inner"):
                outer.append(draws())
            with streams.own():
                found.append(draws())
                with streams.shared("inner"):
                    inner = draws()
            outer.append(draws())
        found.append(draws())
    assert found == expected
    assert len({inner, *outer, *found}) == 7


def test_streams_depend_on_the_position() -> None:
    """Blocks of another name, number or position draw other numbers; the same on every rank."""
    names = [((0, 1), "a"), ((0, 1), "b"), ((0, 1), "a"), ((0, 2), "a")]
    by_rank = []
    for rank in range(2):
        streams, found = RandomStreams(), []
        positions = iter([position for position, _ in names])
        streams.part(5, torch.device("cpu"), positions.__next__)
        with isolated_random_state(rank):
            for _, name in names:
                with streams.shared(name):
                    found.append(draws())
        by_rank.append(found)
    assert by_rank[0] == by_rank[1]
    assert len(set(by_rank[0])) == len(names)
