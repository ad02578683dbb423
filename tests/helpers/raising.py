"""Check in one line that a call raises an error."""

from typing import Any

import pytest


def raises(error: type[BaseException], text: str | None, call: Any, *args: Any, **more: Any) -> None:
    """Check that a call raises an error with a match of the regular expression `text`; None for any text."""
    with pytest.raises(error, match=text):
        call(*args, **more)
