"""Classify exceptions by type, text and chain: which ones another rank's failure or delay has caused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from rankwise.errors import NO_TEXT, RankwiseError, text_of

# The types of torch's errors from gloo, NCCL and the stores; not the types that derive from them.
_TORCH_TYPES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
# Torch's texts for a rank that has ended. An error of another type with the same text is the user's own: a
# web service may refuse a connection, too.
_TORCH_CONSEQUENCE = (
    r"(?is)closed by peer|reset by peer|broken pipe|connection refused|remote process exited|socket closed"
    r"|store: \w+ of .* had no answer (?:in|as)|rank_zero_first\(\) failed on"
)
_CONSEQUENCES = {
    **dict.fromkeys((*_TORCH_TYPES, "RankZeroFailedError"), _TORCH_CONSEQUENCE),
    "JobStopped": "",
}
# Torch's texts, and this package's, for a rank that did not come in time.
_TORCH_TIMEOUT = (
    r"(?is)timed out waiting \d+ ?ms for|wait timeout after \d+ ?ms|store: \w+ of .* had no answer in"
    r"|timed out after \d+ seconds waiting for clients|failed to pass monitoredBarrier in \d+ ms"
    r"|ran for \d+ milliseconds before timing out"
)
_TIMEOUTS = {
    **dict.fromkeys(_TORCH_TYPES, _TORCH_TIMEOUT),
    "RendezvousTimeoutError": r"^Waited [\d.e+]+ s for ",
    "CollectiveMismatchError": r"^Waited [\d.e+]+ s for ",
    "StopAgreementError": r"did not say when",
}

E = TypeVar("E", bound=BaseException)
_MARK = "_rankwise_propagated"
_handled_before: ContextVar[BaseException | None] = ContextVar("handled_before", default=None)


def is_consequence(error: BaseException) -> bool:
    """Return whether an exception, or one that led to it, comes from another rank's failure."""
    # Attribute access to an exception may run the user's code.
    return any(vars(link).get(_MARK, False) or _matches(_CONSEQUENCES, link) for link in _what_led_to(error))


def readable(error: BaseException) -> BaseException:
    """Return an exception, or one of its name in place of one whose class prevents access to attributes."""
    try:
        vars(error), error.__traceback__, error.__cause__, error.__context__, error.__suppress_context__
        isinstance(error, RankwiseError)  # which may read `__class__`
    except Exception:  # noqa: BLE001  whatever the user's code raises
        base = Exception if issubclass(type(error), Exception) else BaseException
        stand_in: BaseException = type(type(error).__name__, (base,), {})(text_of(error))
        return stand_in.with_traceback(BaseException.__dict__["__traceback__"].__get__(error))
    return error


def make_printable(error: BaseException) -> None:
    """Replace the text of an exception, and of its causes, if the user's `__str__` fails or hangs.

    Otherwise Python would hang while it prints the exception at the end of a script. The exception gets a
    subclass of its class.
    """
    for link in chain_of(error):
        if text_of(link) is NO_TEXT:
            kind = type(link)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            with suppress(TypeError):  # a class that allows no subclass
                printable = type(kind.__name__, (kind,), {"__str__": lambda _: NO_TEXT, **names})
                object.__setattr__(link, "__class__", printable)


def is_timeout(error: BaseException) -> bool:
    """Return whether an exception, or one that led to it, means that other ranks did not come in time."""
    return any(_matches(_TIMEOUTS, link) for link in _what_led_to(error))


def is_of_user_code(error: BaseException) -> bool:
    """Return whether user code raised an exception, be it because of another rank's failure."""
    return not (_matches(_CONSEQUENCES, error) or _matches(_TIMEOUTS, error))


def mark_propagated(error: E) -> E:
    """Mark an exception that came from another rank, where it is about to be raised; return it."""
    setattr(error, _MARK, True)
    return error


def _what_led_to(error: BaseException) -> list[BaseException]:
    """Return an exception's chain up to the first error of this package, whose type says enough."""
    chain = chain_of(error)
    ours = [index for index, link in enumerate(chain) if isinstance(link, RankwiseError)]
    return chain[: ours[0] + 1] if ours else chain


def _matches(patterns: Mapping[str, str], error: BaseException) -> bool:
    pattern = patterns.get(type(error).__name__)
    return pattern is not None and bool(re.search(pattern, text_of(error)))


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception and those that a traceback shows before it, by `__cause__` or `__context__`."""
    chain: dict[int, BaseException] = {}
    link: BaseException | None = error
    handled_before = _handled_before.get()
    while link is not None and id(link) not in chain:  # a chain may be circular
        chain[id(link)] = link = readable(link)
        is_apart = link.__suppress_context__ or link.__context__ is handled_before
        context = None if is_apart else link.__context__
        link = context if link.__cause__ is None else link.__cause__
    return list(chain.values())


@contextmanager
def start_exception_chain() -> Iterator[None]:
    """Leave out of `chain_of`, in the block, the exception that the caller is handling.

    Python makes it the context of every exception that is raised in the block, also in a forked process.
    """
    token = _handled_before.set(sys.exc_info()[1])
    try:
        yield
    finally:
        _handled_before.reset(token)
