"""Parsing Slurm's node lists and counts."""

import tracemalloc

import pytest

from rankwise.environments.slurm import expand_counts, expand_node_list
from rankwise.errors import InvalidArgumentError
from tests.helpers.raising import raises


def test_node_lists() -> None:
    """Each form of a node list gives its nodes, in order, and padded, also ten thousand."""
    lists = [
        ("n1", ["n1"]),
        (" n1 ", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[007]", ["n007"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("r[1-2]n[3]x,login", ["r1n3x", "r2n3x", "login"]),
        ("gpu[1,3-4],cpu[02-03],big", ["gpu1", "gpu3", "gpu4", "cpu02", "cpu03", "big"]),
        ("ip-10-0-0-[1-2].eu.internal", ["ip-10-0-0-1.eu.internal", "ip-10-0-0-2.eu.internal"]),
        ("[1-2]", ["1", "2"]),
    ]
    for text, names in lists:
        assert expand_node_list(text) == names
    names = expand_node_list("gpu[00001-10000]")
    assert len(set(names)) == 10_000
    assert (names[0], names[-1]) == ("gpu00001", "gpu10000")


def test_invalid_node_lists() -> None:
    """Other text is our error, with the text shortened."""
    texts = [
        "",
        " ",
        ",",
        "n1,",
        ",n1",
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n1]",
        "n[1-]",
        "n[-1]",
        "n[3-1]",
        "n[1--2]",
        "n[a-b]",
        "n[1-2-3]",
        "n[[1]]",
        "n[1]]",
        "n 1",
        "(null)",
        "n\x00",
        "n[\u0661-\u0663]",
        "n\u0661",
        "$(reboot)",
        "n[" + "9" * 5000 + "]",
    ]
    for text in texts:
        with pytest.raises(InvalidArgumentError, match="node list") as caught:
            expand_node_list(text)
        assert len(str(caught.value)) < 400, text


MANY, LONG = "at most 100000", "at most 255 characters and 16 brackets"


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "problem", "memory"),
    [
        *(("n[1-999999999999999]", MANY, 50_000_000), ("n[0-999][0-999][0-999]", MANY, 50_000_000)),
        *(("n[1-60000],n[1-60000]", MANY, 50_000_000), ("n" * 9000 + "[1-99999]", LONG, 5_000_000)),
        *(("n" + "[1]" * 3000, LONG, 5_000_000), ("n[1]" * 60, LONG, 5_000_000)),
    ],
    ids=["range", "product", "sum", "name", "brackets", "both"],
)
def test_too_long_node_lists(text: str, problem: str, memory: int) -> None:
    """Too many nodes, and names that no host has, are an error before they are expanded."""
    tracemalloc.start()
    try:
        raises(InvalidArgumentError, problem, expand_node_list, text)
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2),4,2(x1)", [1, 1, 4, 2]), (" 8 ", [8]), ("0", [0])],
)
def test_counts(text: str, counts: list[int]) -> None:
    """One count for each node."""
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(x)", "2(3)", "-1", "2,,1", "2(x-1)", "\u0662", "1" * 50])
def test_invalid_counts(text: str) -> None:
    """Other text is our error, and so is a too large repetition, before it is expanded."""
    raises(InvalidArgumentError, "tasks per node", expand_counts, text)
    raises(InvalidArgumentError, "at most 100000", expand_counts, "1(x100000),1(x1)")
