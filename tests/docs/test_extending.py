"""docs/extending.md: each extension, written as on the page, passes the suite of its kind."""

import re
from pathlib import Path

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import PYTEST, with_tests

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_extensions(run_script: ScriptRunner) -> None:
    """Eight extensions, one for each row of the page's table."""
    assert PAGE.partition("\n## ")[0].count("](#a") == PAGE.count("\n## ") == 8
    path = run_script.write("\n\n".join(PROGRAMS), "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests())
    assert "8 passed" in result.stdout, result
