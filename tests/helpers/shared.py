"""Values that several tests share, such as the results of one launch."""

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST_FAILURES = 2


class SharedValues(Generic[T]):
    """Values by key, each computed by the first test that needs it.

    An exception fails the test that asked for the value, and the next test computes it again. What has failed
    `MOST_FAILURES` times is not computed again: the last exception is raised at once.
    """

    def __init__(self) -> None:
        self._values: dict[object, T] = {}
        self._failures: dict[object, list[BaseException]] = {}

    def get(self, key: object, compute: Callable[[], T]) -> T:
        """Return the value of `key`, computed if there is none."""
        if key in self._values:
            return self._values[key]
        failures = self._failures.setdefault(key, [])
        if len(failures) >= MOST_FAILURES:
            raise failures[-1]
        try:
            self._values[key] = compute()
        except BaseException as error:  # also pytest's own, for a time limit
            failures.append(error)
            raise
        return self._values[key]


def computed_once(function: Callable[P, T]) -> Callable[P, T]:
    """Call a fixture's function once for each `request.param`, and give all tests of the module its value.

    A module-scoped fixture does the same, but keeps a failure too: all its tests fail with it. See
    `SharedValues`. The fixture has the default scope, so the checks for leaks cover its first call:

        @pytest.fixture
        @computed_once
        def results() -> list[Any]: ...
    """
    values: SharedValues[T] = SharedValues()

    @functools.wraps(function)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        key = getattr(kwargs.get("request"), "param", None)
        return values.get(key, lambda: function(*args, **kwargs))

    vars(get)["is_shared"] = True  # read by the mutation tester
    return get
