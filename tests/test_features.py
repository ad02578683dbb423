"""docs/features.md: every row names existing tests, one on several processes, and one of the default tier."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import SLOW_FOLDERS

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "features.md"
LIMITS = REPOSITORY / "docs" / "exactness.md"
ON_PROCESSES = tuple(f"tests/{folder}/" for folder in ("process", "contract", "cluster", "gpu"))


def rows(page: str = PAGE.read_text()) -> list[tuple[str, list[str]]]:
    """Return each row's feature, and the tests that it names."""
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [(cells[0], re.findall(r"`(tests/[^`]+)`", cells[-1])) for cells in lines]
    return [(feature, tests) for feature, tests in rows if feature != "| feature"]


@cache
def functions_in(path: str) -> dict[str, ast.FunctionDef]:
    """Return the tests in a file by name, those in classes with the class's."""
    tree = ast.parse((REPOSITORY / path).read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}::{item.name}": item for item in methods}
    return {name: node for name, node in found.items() if name.rpartition("::")[2].startswith("test_")}


def is_in_default_tier(test: str) -> bool:
    """Return whether plain `pytest` runs a test, at least for some of its parameters."""
    path, name = test.split("::", 1)
    marks = [ast.unparse(each) for each in functions_in(path)[name].decorator_list]
    if not path.startswith(tuple(f"tests/{folder}/" for folder in (*SLOW_FOLDERS, "cluster", "gpu"))):
        return not {"pytest.mark.full", "pytest.mark.soak"} & set(marks)
    return any("pytest.mark.quick" in each for each in marks)


def missing(tests: list[str]) -> list[str]:
    """Return the tests that do not exist."""
    named = [(test, *test.split("::", 1)) for test in tests]
    return [
        test
        for test, path, name in named
        if not (REPOSITORY / path).is_file() or name not in functions_in(path)
    ]


def test_there_are_rows() -> None:
    """The page is not empty, and no feature stands there twice."""
    features = [feature for feature, _ in rows()]
    assert len(features) > 20
    assert len(set(features)) == len(features)


def test_features() -> None:
    """The tests of a row exist, one of them runs real processes, and one is in the default tier."""
    for feature, tests in rows():
        assert missing(tests) == [], feature
        assert any(test.startswith(ON_PROCESSES) for test in tests), feature
        assert any(map(is_in_default_tier, tests)), feature


def test_limits() -> None:
    """Each row of docs/exactness.md, "Limits", names tests, all of which exist."""
    section = LIMITS.read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    limits = [(what, tests) for what, tests in rows(section) if what != "| what"]
    assert len(limits) > 20
    for what, tests in limits:
        assert tests, what
        assert missing(tests) == [], what
