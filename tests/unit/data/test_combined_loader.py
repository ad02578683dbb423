"""`CombinedLoader`: what each mode yields, its length, the structure of its batches."""

from collections import namedtuple
from typing import Any

import pytest
from torch.utils.data import DataLoader

from rankwise.data import CombinedLoader
from rankwise.data.combined_loader import rows as rows_of
from rankwise.errors import ConfigurationError, InvalidTypeError, MissingAttributeError, UnknownNameError
from tests.helpers.raising import raises

A, B = range(3), range(10, 12)
Pair = namedtuple("Pair", ["first", "second"])

# What Lightning 2.6's CombinedLoader({"a": A, "b": B}, mode) yields.
LIGHTNINGS: dict[str, list[Any]] = {
    "min_size": [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0)],
    "max_size_cycle": [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0), ({"a": 2, "b": 10}, 2, 0)],
    "max_size": [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0), ({"a": 2, "b": None}, 2, 0)],
    "sequential": [(0, 0, 0), (1, 1, 0), (2, 2, 0), (10, 0, 1), (11, 1, 1)],
}


@pytest.mark.parametrize("mode", LIGHTNINGS)
def test_modes(mode: Any) -> None:
    """Batches and numbers are Lightning's, in each pass; the length is their number."""
    combined = CombinedLoader({"a": A, "b": B}, mode)
    assert list(combined) == LIGHTNINGS[mode] == list(combined)
    assert len(combined) == len(LIGHTNINGS[mode])


@pytest.mark.parametrize(
    ("iterables", "first"),
    [
        *((A, 0), ([A, B], [0, 10]), ((A, B), (0, 10)), (Pair(A, B), Pair(0, 10))),
        *(({"x": [A, {"y": B}]}, {"x": [0, {"y": 10}]}), ([[1, 2], [3, 4]], [1, 3])),
    ],
)
def test_structure(iterables: Any, first: Any) -> None:
    """A batch has the structure of the loaders; a list of numbers is one iterable."""
    assert next(iter(CombinedLoader(iterables)))[0] == first
    assert list(CombinedLoader([])) == []  # nothing combined is nothing
    assert len(CombinedLoader({})) == 0


def test_passes() -> None:
    """Where a length is needed, or a new start, one without is an error; the pass ends with the others."""
    assert len(CombinedLoader([A, iter(B)], "min_size")) == 3  # the generator's is unknown
    raises(TypeError, "no length", len, CombinedLoader([A, iter(B)], "max_size"))
    assert [row for row, _, _ in CombinedLoader([A, iter(B)], "max_size")] == [[0, 10], [1, 11], [2, None]]
    with pytest.raises(ConfigurationError, match="Loader 1 of several has no batch"):
        list(CombinedLoader([A, iter(B)], "max_size_cycle"))
    starts = [lambda _: iter(A), lambda _: iter(B)]
    assert list(rows_of("max_size_cycle", starts, [1, 0])) == [[0, 10], [1, 11]]


def test_samplers() -> None:
    """Samplers come in the structure of the loaders."""
    loader: DataLoader[int] = DataLoader(list(A), batch_size=2)  # type: ignore[arg-type]  # it takes any
    combined = CombinedLoader({"a": loader, "b": B})
    assert combined.sampler == {"a": loader.sampler, "b": None}
    assert combined.batch_sampler == {"a": loader.batch_sampler, "b": None}
    assert combined.flattened == [loader, B]


def test_what_is_refused() -> None:
    """Another mode, what is no iterable, and one within another."""
    raises(UnknownNameError, "'max_sizes'", CombinedLoader, [A], "max_sizes")
    raises(InvalidTypeError, "iterable over batches", CombinedLoader, [A, 3.5, object()])
    raises(InvalidTypeError, "one CombinedLoader takes all", CombinedLoader, [A, CombinedLoader(B)])
    with pytest.raises(MissingAttributeError, match=r"no limits\.\n.*limit_train_batches"):
        CombinedLoader([A]).limits = 2
    raises(MissingAttributeError, "no reset", getattr, CombinedLoader([A]), "reset")
