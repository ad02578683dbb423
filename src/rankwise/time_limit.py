"""Call a function with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def call_with_limit(
    function: Callable[[], T], limit_s: float, *ignored: type[BaseException], name: str = "rankwise-call"
) -> list[T]:
    """Call a function in a daemon thread, named `name`; return its value.

    Return nothing after the limit or an `ignored` exception.
    """
    values: list[T] = []

    def run() -> None:
        with suppress(*ignored):
            values.append(function())

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads; Python 3.12 starts none while exit hooks run
        run()
    else:
        thread.join(limit_s)
    return list(values)
