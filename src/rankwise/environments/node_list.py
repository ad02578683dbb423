"""Parse Slurm's compressed node lists, such as `gpu[01-03,7],login`, and counts, such as `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from rankwise.errors import InvalidArgumentError

__all__ = ["expand_counts", "expand_node_list"]

_MAX_NODES = 100_000  # more than any cluster has: a longer list is damaged, and is not expanded

_PART = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")

Part = list[tuple[str, str]]
"""The alternatives for one part of a name: ranges as (first, last); equal ends stand for that text."""


def expand_node_list(text: str) -> list[str]:
    """Return the names of the nodes, in the list's order.

    It supports ranges, commas, zero padding, several brackets in a name and text after a bracket.

    Raises:
        InvalidArgumentError: when the text is not a node list, or has more than 100,000 nodes.

    Example:
        >>> expand_node_list("gpu[08-10,3],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    """
    names: list[str] = []
    for word in _words(text):
        parts = _parts(word, text)
        count = 1
        for part in parts:
            count *= _size(part, text)
            _check_size(len(names) + count, text)
        names.extend("".join(chosen) for chosen in product(*(list(_expanded(part)) for part in parts)))
    return names


def expand_counts(text: str) -> list[int]:
    """Return one count for each node, from a value of `SLURM_TASKS_PER_NODE`.

    Raises:
        InvalidArgumentError: when the text is not such a list, or has more than 100,000 nodes.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for word in text.strip().split(","):
        found = _COUNT.fullmatch(word.strip())
        if found is None:
            raise InvalidArgumentError(
                argument="tasks per node", value=_shortened(text), expected='counts, such as "2(x3),1"'
            )
        times = int(found[2] or 1)
        _check_size(len(counts) + times, text)
        counts.extend([int(found[1])] * times)
    return counts


def _words(text: str) -> Iterator[str]:
    """Split the text at the commas outside of brackets."""
    word: list[str] = []
    depth = 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield "".join(word)
            word = []
        else:
            word.append(character)
    yield "".join(word)


def _parts(word: str, text: str) -> list[Part]:
    parts, end = [], 0
    for found in _PART.finditer(word):
        if found.start() != end:
            break
        end = found.end()
        parts.append([(found[2], found[2])] if found[2] else _ranges(found[1], text))
    if end != len(word) or not word:
        raise _parse_error(text)
    return parts


def _ranges(inside: str, text: str) -> Part:
    ranges = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise _parse_error(text)
        low, high = found[1], found[2] or found[1]
        if int(low) > int(high):
            raise _parse_error(text)
        ranges.append((low, high))
    return ranges


def _size(part: Part, text: str) -> int:
    size = sum(1 if low == high else int(high) - int(low) + 1 for low, high in part)
    _check_size(size, text)
    return size


def _expanded(part: Part) -> Iterator[str]:
    for low, high in part:
        if low == high:
            yield low
        else:
            yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def _check_size(size: int, text: str) -> None:
    if size > _MAX_NODES:
        raise InvalidArgumentError(
            argument="node list", value=_shortened(text), expected=f"at most {_MAX_NODES} nodes"
        )


def _parse_error(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        argument="node list",
        value=_shortened(text),
        expected='names with ranges, such as "gpu[01-03,7],login"',
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
