"""Names with options: `"name:option=value,option=value"`."""

from __future__ import annotations

from typing import Any

from rankwise.errors import InvalidTypeError

__all__ = ["split_options"]

_WORDS = {"true": True, "false": False, "none": None}


def split_options(argument: str, given: str) -> tuple[str, dict[str, Any]]:
    """Return a name and the options that go with it: numbers, `true`, `false` and `none` as such, else text.

    Args:
        argument: what the user knows `given` by, for the error.
        given: a name, with options or without.

    Raises:
        InvalidTypeError: when an option has no name or no value.
    """
    name, _, rest = given.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        option, _, value = (part.strip() for part in item.partition("="))
        if not option or not value:
            raise InvalidTypeError(
                argument=argument, value=given, expected='a name with options: "name:option=value"'
            )
        options[option] = _value(value)
    return name.strip(), options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
