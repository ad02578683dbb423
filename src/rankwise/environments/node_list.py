"""Parse Slurm's compressed node lists, such as `gpu[01-03,7],login`, and counts, such as `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import TypeVar

from rankwise.errors import InvalidArgumentError

T = TypeVar("T")

_MAX_NODES = 100_000  # more than any cluster has: a longer list is damaged, and is not expanded
_MAX_NAME = 255  # characters of a node's name beside brackets: DNS allows no more
_MAX_BRACKETS = 16  # in a name: Slurm has names of five dimensions

_BRACKET = r"\[[^\[\]]*\]"
_WORD = rf"(?:[A-Za-z0-9._-]|{_BRACKET})+"
_LIST = f"{_WORD}(?:,{_WORD})*"
_RANGE = r"([0-9]{1,15})(?:-([0-9]{1,15}))?"
_COUNT = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


def expand_node_list(text: str) -> list[str]:
    """Return the names of the nodes, in the list's order.

    It supports ranges, commas, zero padding, several brackets in a name and text after a bracket.

    Example:
        >>> expand_node_list("gpu[08-10,3],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    """
    if re.fullmatch(_LIST, text.strip()) is None:
        raise _not_a_node_list(text)
    words = re.findall(_WORD, text)
    longest = max(len(re.sub(_BRACKET, "", word)) for word in words)
    if longest > _MAX_NAME or max(word.count("[") for word in words) > _MAX_BRACKETS:
        expected = f"names of at most {_MAX_NAME} characters and {_MAX_BRACKETS} brackets"
        raise _error("node list", text, expected)
    return _limited(chain.from_iterable(_names(word, text) for word in words), text)


def expand_counts(text: str) -> list[int]:
    """Return one count for each node, from a value of `SLURM_TASKS_PER_NODE`.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    return _limited(_counts(text), text)


def _names(word: str, text: str) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    inside, _, after = rest.partition("]")
    for number in _numbers(inside, text):
        for end in _names(after, text):
            yield f"{before}{number}{end}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        found = re.fullmatch(_RANGE, item)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise _not_a_node_list(text)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))


def _counts(text: str) -> Iterator[int]:
    for word in text.strip().split(","):
        found = re.fullmatch(_COUNT, word.strip())
        if found is None:
            raise _error("tasks per node", text, 'counts, such as "2(x3),1"')
        yield from repeat(int(found[1]), int(found[2] or 1))


def _limited(items: Iterable[T], text: str) -> list[T]:
    found = list(islice(items, _MAX_NODES + 1))
    if len(found) > _MAX_NODES:
        raise _error("node list", text, f"at most {_MAX_NODES} nodes")
    return found


def _not_a_node_list(text: str) -> InvalidArgumentError:
    return _error("node list", text, 'names with ranges, such as "gpu[01-03,7],login"')


def _error(argument: str, text: str, expected: str) -> InvalidArgumentError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return InvalidArgumentError(argument=argument, value=shown, expected=expected)
