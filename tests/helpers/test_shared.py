"""A shared value is computed once, and again after a failure."""

import pytest

from tests.helpers.raising import raises
from tests.helpers.shared import MOST_FAILURES, computed_once

_calls: list[str] = []


@pytest.fixture(params=["one", "two"])
@computed_once
def value(request: pytest.FixtureRequest) -> str:
    _calls.append(request.param)
    return f"value of {request.param}"


@pytest.mark.parametrize("test", [1, 2, 3])
def test_one_value_for_each_parameter(value: str, test: int, request: pytest.FixtureRequest) -> None:
    """Each parameter of the fixture has a value of its own, whatever test asks for it."""
    parameter = value.removeprefix("value of ")
    assert parameter in request.node.name
    assert _calls.count(parameter) == 1


def test_a_failure_is_not_kept() -> None:
    """The call after a failed one calls the function again."""
    outcomes = iter([ValueError("broken"), None])

    @computed_once
    def flaky() -> str:
        if (error := next(outcomes)) is not None:
            raise error
        return "value"

    raises(ValueError, "broken", flaky)
    assert [flaky(), flaky()] == ["value", "value"]


def test_a_function_that_always_fails_is_given_up() -> None:
    """After some failures the last one is raised without a call."""
    calls: list[int] = []

    @computed_once
    def broken() -> None:
        calls.append(len(calls))
        raise ValueError(f"call {len(calls)}")

    for _ in range(MOST_FAILURES + 2):
        raises(ValueError, "call", broken)
    assert len(calls) == MOST_FAILURES
