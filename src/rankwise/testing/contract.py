"""`Contract`: the rules that an extension has to keep; what breaks them is collected, then raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from rankwise.errors import ContractError, text_of


@final
class Contract:
    """The rules for one object.

    Attributes:
        problems: a line for each rule that is broken.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def rule(self, sentence: str) -> Iterator[None]:
        """Check one rule in the block: it is broken if the block raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever the extension raises
            kind = "" if type(error) is AssertionError else f"{type(error).__name__}: "
            self.problems.append(f"{sentence}: {kind}{text_of(error)}")

    def check(self, subject: object) -> None:
        """Raise `ContractError` if a rule is broken; `subject` is what was checked."""
        if self.problems:
            raise ContractError(subject=repr(subject), problems=tuple(dict.fromkeys(self.problems)))


def expect(holds: object, problem: str) -> None:
    """Raise an `AssertionError` unless `holds`."""
    if not holds:
        raise AssertionError(problem)


def expect_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise an `AssertionError` unless two values, tensors within a tolerance, are equal."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    else:
        expect(found == expected, f"{found!r} instead of {expected!r}")


@contextmanager
def expect_error(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """Raise an `AssertionError` unless the block raises such an exception, with these texts in its own."""
    try:
        yield
    except kind as error:
        for text in texts:
            expect(text in str(error), f"the {kind.__name__} does not name {text!r}: {error}")
    else:
        expect(False, f"there is no {kind.__name__}")
