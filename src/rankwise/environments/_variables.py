"""Typed, read-only access to a mapping of environment variables, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import final

from rankwise.errors import EnvironmentVariableError

_HIGHEST_COUNT = 10_000_000


@final
class Variables:
    """The variables that one environment reads."""

    def __init__(self, environment: str, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._environment = environment

    def has(self, name: str) -> bool:
        """Return whether a variable is set to more than blanks."""
        return bool(self.environ.get(name, "").strip())

    def text(self, name: str) -> str:
        """Return a variable that must be set and not empty."""
        value = self.environ.get(name, "").strip()
        if not value:
            raise self.error(f"{name} is not set", {})
        return value

    def number(self, name: str, highest: int = _HIGHEST_COUNT, lowest: int = 0) -> int:
        """Return a variable that must hold a whole number from `lowest` to `highest`."""
        text = self.text(name)
        # str.isdecimal keeps signs, spaces, underscores and fractions out; isascii other digits
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(highest))):
            raise self.error(f"{name} is not a number from {lowest} to {highest}", {name: text})
        if not lowest <= int(text) <= highest:
            raise self.error(f"{name} is not within {lowest} to {highest}", {name: text})
        return int(text)

    def first_set(self, *names: str) -> str | None:
        """Return the first of these variables that is set, None where none is."""
        return next((name for name in names if self.has(name)), None)

    def error(self, problem: str, shown: Mapping[str, str]) -> EnvironmentVariableError:
        """Build the error that names this environment."""
        return EnvironmentVariableError(
            environment=self._environment, problem=problem.rstrip("."), variables=dict(shown)
        )
