"""`errors_shared` and `call_on_rank_zero`, with ranks as threads, and in one process."""

import gc
import weakref

import pytest

from rankwise.errors import CheckpointError, WorkerRaisedError
from rankwise.failures.classify import is_consequence
from rankwise.strategies import SingleDeviceStrategy
from rankwise.strategies.collectives import errors_shared
from tests.helpers.threaded import ThreadedStrategy, run_ranks


def bound(rank: int) -> ThreadedStrategy:
    """Return the strategy of one rank of three."""
    strategy = ThreadedStrategy(rank, 3)
    strategy.bind()
    return strategy


def fail(rank: int, error: Exception) -> Exception | None:
    """Raise `error` on one rank of three; return what this rank gets."""
    strategy = bound(rank)
    try:
        with errors_shared(strategy):
            if rank == 1:
                raise error
    except Exception as raised:
        return raised
    return None


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    """The others' are consequences, and describe a user's error, which may be unreadable there."""
    original = CheckpointError(path="a.ckpt", problem="is gone")
    errors = run_ranks(3, lambda rank: fail(rank, original))
    assert [str(error) for error in errors] == [str(original)] * 3
    assert errors[1] is original
    assert [is_consequence(error) for error in errors if error is not None] == [True, False, True]
    described = run_ranks(3, lambda rank: fail(rank, KeyError("key")))
    assert [type(error) for error in described] == [WorkerRaisedError, KeyError, WorkerRaisedError]
    assert "global_rank=1" in str(described[0])


def test_the_value_of_rank_zero() -> None:
    """Only rank 0 calls the function."""
    assert run_ranks(3, lambda rank: bound(rank).call_on_rank_zero(lambda: rank + 10)) == [10, 10, 10]


def test_nothing_keeps_the_error() -> None:
    """The error is gone with its last reference, without a collection of cycles."""

    class OwnError(Exception):
        pass

    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.bind()
    gc.disable()
    try:
        with pytest.raises(OwnError) as caught, errors_shared(strategy):
            raise OwnError
        kept = weakref.ref(caught.value)
        del caught
        assert kept() is None
    finally:
        gc.enable()
