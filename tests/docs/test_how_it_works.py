"""docs/how_it_works.md and docs/index.md: files that they name exist, and define the names beside them."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "rankwise"
PAGE = (REPOSITORY / "docs" / "how_it_works.md").read_text()
PATHS = PAGE.partition("\n## Four paths through the code\n")[2]
INDEX = (REPOSITORY / "docs" / "index.md").read_text()
ROWS = re.findall(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|$", PATHS, re.MULTILINE)
FOLDERS = sorted({path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path()})


def names_in(path: Path) -> set[str]:
    """Return what a file defines: functions, classes, methods as `Class.method`, and other names."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_paths_through_the_code() -> None:
    """Each row of the four tables, all of which are found, names a file, and what it defines."""
    assert len(ROWS) == len(re.findall(r"\.py` \|", PATHS)) > 40
    assert [(file, name) for file, name in ROWS if name not in names_in(SOURCE / file)] == []


def test_files_of_the_index() -> None:
    """Each file that the index names exists."""
    named = re.findall(r"`([\w/]+\.py)`", INDEX)
    assert named
    assert [name for name in named if not any((root / name).is_file() for root in (SOURCE, REPOSITORY))] == []


def test_folders_of_the_index() -> None:
    """Each folder of the source and of the tests, and each file beside them, is in a table of the index."""
    files = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py", "__main__.py"}
    tests = sorted(path.parent.name for path in (REPOSITORY / "tests").glob("*/__init__.py"))
    named = set(re.findall(r"`([\w/]+?)/?`", INDEX))
    assert [str(folder) for folder in FOLDERS if str(folder) not in named] == []
    assert files - set(re.findall(r"`(\w+\.py)`", INDEX)) == set()
    assert [name for name in tests if f"tests/{name}" not in named] == []
