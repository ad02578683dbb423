"""Read the pages of the documentation."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SOURCE = REPOSITORY / "src" / "rankwise"


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of code in a language, of the page with that text."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
