"""Parse Slurm's compressed node lists, such as `gpu[01-03,7],login`, and counts, such as `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from rankwise.errors import InvalidArgumentError

_MAX_NODES = 100_000  # more than any cluster has: a longer list is damaged, and is not expanded

_WORD = r"(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+"
_WORDS = re.compile(_WORD)
_LIST = re.compile(f"{_WORD}(?:,{_WORD})*")
_PART = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")

Part = list[tuple[str, str]]
"""The alternatives for one part of a name: ranges as (first, last); equal ends stand for that text."""


def expand_node_list(text: str) -> list[str]:
    """Return the names of the nodes, in the list's order.

    It supports ranges, commas, zero padding, several brackets in a name and text after a bracket.

    Example:
        >>> expand_node_list("gpu[08-10,3],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    """
    if _LIST.fullmatch(text.strip()) is None:
        raise _parse_error(text)
    names: list[str] = []
    for word in _WORDS.findall(text):
        parts = [
            [(plain, plain)] if plain else _ranges(inside, text) for inside, plain in _PART.findall(word)
        ]
        count = 1
        for part in parts:
            count *= _size(part)
            _check_size(len(names) + count, text)
        names.extend("".join(chosen) for chosen in product(*map(_expanded, parts)))
    return names


def expand_counts(text: str) -> list[int]:
    """Return one count for each node, from a value of `SLURM_TASKS_PER_NODE`.

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


def _ranges(inside: str, text: str) -> Part:
    ranges = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise _parse_error(text)
        ranges.append((found[1], found[2] or found[1]))
    return ranges


def _size(part: Part) -> int:
    return sum(1 if first == last else int(last) - int(first) + 1 for first, last in part)


def _expanded(part: Part) -> Iterator[str]:
    for first, last in part:
        if first == last:
            yield first
        else:
            yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


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
