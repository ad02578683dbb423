"""The picture of the folders and their imports is the one that docs/draw_imports.py draws from the code."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_is_up_to_date() -> None:
    """The committed picture is what the script draws; if not, run `python docs/draw_imports.py`."""
    script = runpy.run_path(str(DOCS / "draw_imports.py"))
    assert (DOCS / "pictures" / "imports.svg").read_text() == script["draw"]()
