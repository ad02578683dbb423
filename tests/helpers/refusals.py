"""Check in one line that a call is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], text: str, call: Callable[..., Any], *args: Any, **more: Any) -> None:
    """Check that a call raises an error whose text has a match of the regular expression `text`."""
    with pytest.raises(error, match=text):
        call(*args, **more)
