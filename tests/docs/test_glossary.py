"""The pages about the code's parts use names that exist, and the glossary has each term once."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SOURCE = "\n".join(path.read_text() for path in (REPOSITORY / "src" / "rankwise").rglob("*.py"))
PAGES = ("glossary.md", "how_it_works.md", "index.md", "decisions/0009-a-strategy-made-of-parts.md")


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    """A class, function or file that a page names is in the source."""
    text = (DOCS / page).read_text()
    names = set(re.findall(r"`([A-Z][a-z]\w+)`", text))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", SOURCE)] == []
    files = set(re.findall(r"`([a-z]\w*/[\w/]*(?:\.py)?)`", text)) - {"tests/", "docs/"}
    sources = [REPOSITORY / "src" / "rankwise", REPOSITORY]
    assert [name for name in sorted(files) if not any((root / name).exists() for root in sources)] == []


def test_terms_are_unique() -> None:
    """No term stands in the glossary twice."""
    terms = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 80
    assert sorted(terms) == sorted(set(terms))
