"""What led to an exception, and what it says."""

import pytest

from rankwise.errors import text_of
from rankwise.failures.classify import chain_of, start_exception_chain


def test_a_text_that_cannot_be_had() -> None:
    """An exception whose `__str__` fails has a text all the same; a text that is too long has no end."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise LookupError

    assert text_of(Wordless()) == "(its text could not be had)"
    assert text_of(ValueError("text")) == "text"
    text = text_of(ValueError("x" * 3_000_000))
    assert text.endswith("x... (3000000 characters)")
    assert len(text) < 1_100_000


def test_the_chain_is_what_a_traceback_shows() -> None:
    """What an exception was raised from goes before what was handled, and `from None` or a circle ends it."""
    inner, handled, outer = KeyError("inner"), OSError("handled"), ValueError("outer")
    with pytest.raises(ValueError, match="outer"):
        try:
            raise handled
        except OSError:
            raise outer from inner
    assert chain_of(outer) == [outer, inner]
    outer.__cause__, outer.__suppress_context__ = None, False
    assert chain_of(outer) == [outer, handled]
    outer.__suppress_context__ = True
    assert chain_of(outer) == [outer]
    outer.__cause__, inner.__cause__ = inner, outer
    assert chain_of(outer) == [outer, inner]


def test_what_was_handled_before_the_work_led_to_nothing_in_it() -> None:
    """Python links it to what the work raises all the same; outside the work it is a part of the chain."""
    handled, first, second = OSError("handled"), KeyError("first"), ValueError("second")
    with pytest.raises(ValueError, match="second"):
        try:
            raise handled
        except OSError:
            with start_exception_chain():
                try:
                    try:
                        raise first
                    except KeyError:
                        raise second  # noqa: B904  linked by Python alone
                except ValueError:
                    assert chain_of(second) == [second, first]
                    raise
    assert chain_of(second) == [second, first, handled]
