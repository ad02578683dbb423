"""docs/extending.md: each extension, written as on the page, passes the suite of its kind."""

import re
from pathlib import Path

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import PYTEST, with_tests

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
PROGRAM = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
STORAGE_IN_A_JOB = """

def test_the_storage_in_a_job(tmp_path):
    check_strategy(DDPStrategy(checkpoint_io=Below(tmp_path), **TWO, start_method="fork"))
"""
AS_A_SCRIPT = """

if __name__ == "__main__":  # each rank runs all of it
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test(*[folder] * test.__code__.co_argcount)
                print(os.environ.get("RANK", "0"), name, "passed")
"""


def test_the_extensions(run_script: ScriptRunner) -> None:
    """Eight extensions, one for each row of the page's table."""
    assert PAGE.partition("\n## ")[0].count("](#a") == PAGE.count("\n## ") == 8
    path = run_script.write(PROGRAM, "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests(), siblings=8)  # for the launcher
    assert "8 passed" in result.stdout, result


@pytest.mark.soak
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_other_start_methods(run_script: ScriptRunner, start_method: str) -> None:
    """The same in processes that import what they need; an environment starts none, a launcher its own."""
    program = f"{PROGRAM}{STORAGE_IN_A_JOB}".replace('"fork"', f'"{start_method}"')
    path = run_script.write(program, "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests(), timeout=300)
    assert "9 passed" in result.stdout, result


def test_in_a_script(run_script: ScriptRunner) -> None:
    """The same where the script is run again for each rank; a launcher starts all ranks by itself."""
    in_a_script = re.sub(r"\n\ndef test_the_launcher.*?(?=\n\n\n)", "", PROGRAM, flags=re.DOTALL)
    program = f"{in_a_script}{STORAGE_IN_A_JOB}{AS_A_SCRIPT}".replace('"fork"', '"popen"')
    result = run_script(program, siblings=8)
    assert result.returncode == 0, result
    assert [result.stdout.count(f"{rank} test_") for rank in (0, 1)] == [8, 8], result
