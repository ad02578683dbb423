"""The random state and torch's flags that a worker takes over from the launching process."""

import pickle
from collections.abc import Iterator

import pytest
import torch

from rankwise import seed
from rankwise.launchers import process_state
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.process_state import ProcessState
from rankwise.ranks import RankInfo
from tests.unit.test_seed import draws


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give this process its own state again after each test."""
    before = ProcessState.of_this_process()
    yield
    before.take_over()


def test_random_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch, Python and NumPy are the same as in the launching process, at each start."""
    torch.manual_seed(5)
    state = pickle.loads(pickle.dumps(ProcessState.of_this_process()))
    expected, begun = draws(), torch.initial_seed()
    torch.manual_seed(6)
    for _ in range(2):
        found = state.run(lambda worker: draws(), WorkerContext(RankInfo()))
        assert found == expected
        assert torch.initial_seed() == begun == 5


def test_flags_are_taken_over() -> None:
    """Settings and attributes of torch; what the launch decides replaces this process's own value."""
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    state = ProcessState.of_this_process()
    torch.set_default_dtype(torch.float32)
    torch.backends.cudnn.benchmark = False
    state.take_over()
    assert torch.get_default_dtype() is torch.float64
    assert torch.backends.cudnn.benchmark
    threads = torch.get_num_threads()
    state = ProcessState.of_this_process(threads=threads + 1)
    assert state.flags["threads"] == threads + 1
    state.take_over()
    assert torch.get_num_threads() == threads + 1


def test_flags_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this version of torch does not have; and the same value, which may warn or initialise a device."""
    monkeypatch.setitem(process_state._FLAGS, "none", process_state._attribute("backends.none.enabled"))
    state = ProcessState.of_this_process()
    assert "none" not in state.flags
    ProcessState.of_this_process(none=True).take_over()
    puts: list[object] = []
    monkeypatch.setitem(process_state._FLAGS, "counted", (lambda: 1, puts.append))
    for value in (1, 2):
        ProcessState.of_this_process(counted=value).take_over()
    assert puts == [2]


def test_the_seed_that_was_given() -> None:
    """A worker derives its own seeds from it as the launching process would."""
    before = seed.given_seed()
    state = ProcessState.of_this_process()
    assert state.given_seed == before
    ProcessState(state.flags, state.random, state.torch_seed, 17).take_over()
    assert seed.given_seed() == 17
