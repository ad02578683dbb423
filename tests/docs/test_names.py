"""Names, files and hooks that the pages about the code have are those of the code."""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise.callbacks import Callback
from rankwise.trainer.hooks import HOOKS, Hook
from tests.docs.pages import DOCS, REPOSITORY, SOURCE, blocks

CODE = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
PAGES = ("glossary.md", "how_it_works.md", "index.md", "decisions/0009-a-strategy-made-of-parts.md")
PATHS = (DOCS / "how_it_works.md").read_text().partition("\n## Four paths through the code\n")[2]
ROWS = re.findall(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|$", PATHS, re.MULTILINE)
INDEX = (DOCS / "index.md").read_text()
FOLDERS = sorted({path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path()})


def is_there(name: str) -> bool:
    """Return whether there is a file or folder of this name, in the source or the repository."""
    return any((root / name).exists() for root in (SOURCE, REPOSITORY))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    """A class, function or file that a page names is in the source."""
    text = (DOCS / page).read_text()
    names = set(re.findall(r"`([A-Z][a-z]\w+)`", text))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", CODE)] == []
    files = set(re.findall(r"`([a-z]\w*/[\w/]*(?:\.py)?)`", text)) - {"tests/", "docs/"}
    assert [name for name in sorted(files) if not is_there(name)] == []


def test_terms_are_unique() -> None:
    """No term stands in the glossary twice."""
    terms = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 80
    assert sorted(terms) == sorted(set(terms))


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


def test_files_and_folders_of_the_index() -> None:
    """Each file that the index names exists; it names all folders of source and tests, and files beside."""
    named = re.findall(r"`([\w/]+\.py)`", INDEX)
    assert named
    assert [name for name in named if not is_there(name)] == []
    assert {path.name for path in SOURCE.glob("*.py")} - {*named, "__init__.py", "__main__.py"} == set()
    tests = [f"tests/{path.parent.name}" for path in (REPOSITORY / "tests").glob("*/__init__.py")]
    folders = set(re.findall(r"`([\w/]+?)/?`", INDEX))
    assert [name for name in [*map(str, FOLDERS), *tests] if name not in folders] == []


def test_the_picture_is_up_to_date() -> None:
    """The committed picture is what the script draws; if not, run `python docs/draw_imports.py`."""
    script = runpy.run_path(str(DOCS / "draw_imports.py"))
    assert (DOCS / "pictures" / "imports.svg").read_text() == script["draw"]()


def row(hook: Hook) -> tuple[str, bool]:
    """Return the first columns of a hook's line in docs/hooks.md, and whether the last one has a note."""
    arguments = hook.arguments.replace("?", "")
    return f"| `{hook.name}({arguments})` | {', '.join(hook.owners)}", hook.is_automatic


def test_the_hooks() -> None:
    """docs/hooks.md has every hook, in the order of the code; the classes of the page can be defined."""
    page = (DOCS / "hooks.md").read_text()
    lines = [line.rsplit(" | ", 1) for line in page.splitlines() if line.startswith("| `")]
    assert [(start, "Automatic optimisation only." in last) for start, last in lines] == list(map(row, HOOKS))
    names: dict[str, Any] = {"TrainingModule": rankwise.TrainingModule, "Callback": Callback}
    for code in blocks(page):
        exec(code, names)  # the page's own code
    assert "on_exception" in vars(names["SaveOnFailure"])
    assert "optimizer_step" in vars(names["WarmUp"])
    assert "on_fit_start" in vars(names["OnlineEvaluator"])
