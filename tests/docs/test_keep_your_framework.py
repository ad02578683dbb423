"""The programs of docs/keep_your_framework.md run on two ranks."""

import re
from pathlib import Path

import pytest

from tests.helpers.needs import need_installed
from tests.helpers.scripts import ScriptRunner

pytestmark = pytest.mark.frameworks

PAGE = (Path(__file__).parents[2] / "docs" / "keep_your_framework.md").read_text()
PROGRAMS = {
    heading: code[1]
    for heading, text in re.findall(r"^##+ ([^\n]*)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if (code := re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
}
PRINTED = {
    "Lightning's Trainer": "trained 32 steps on 2 ranks",
    "Lightning's Fabric": "steps of each rank: 4",
    "A LightningModule in rankwise's Trainer": "weights: [1.0, 1.0]",
    **dict.fromkeys(("Any other program", "transformers", "Accelerate"), "steps of each rank: 4"),
    "Lightning with its own strategy": "steps of each rank: 32",
}
# Lightning's detection starts MPI, where it is installed.
FIRST = 'import sys\nsys.modules["mpi4py.MPI"] = None\n'
FORKED = {
    '"rankwise_ddp"': '"rankwise_ddp_fork"',
    '"rankwise_ddp_spawn"': '"rankwise_ddp_fork"',
    '"ddp_spawn"': '"ddp_fork"',
    'start_method="spawn"': 'start_method="fork"',
}
"""What starts the ranks on the page, and what starts them quickly."""
TOGETHER = """
for name, program in {programs!r}.items():
    print("--", name, flush=True)
    exec(compile(program, name, "exec"), {{"__name__": "__main__"}})
"""


def lines_of(printed: str) -> list[str]:
    """Return the lines that the programs print themselves; Lightning prints, too."""
    starts = tuple(line.split()[0] for line in PRINTED.values())
    return [line for line in printed.splitlines() if line.startswith(starts)]


def test_the_programs(run_script: ScriptRunner) -> None:
    """Each of the page trains on two ranks, and prints its line once; here by fork, in one process."""
    assert list(PROGRAMS) == list(PRINTED)
    need_installed("lightning", "transformers", "accelerate")
    forked = {
        name: re.sub("|".join(FORKED), lambda found: FORKED[found[0]], program)
        for name, program in PROGRAMS.items()
    }
    assert all(forked[name] != PROGRAMS[name] for name in PROGRAMS)
    result = run_script(FIRST + TOGETHER.format(programs=forked), timeout=240)
    assert result.returncode == 0, result
    parts = result.stdout.split("-- ")[1:]
    assert {part.partition("\n")[0]: lines_of(part) for part in parts} == {
        name: [line] for name, line in PRINTED.items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("heading", PRINTED)
def test_a_program_as_it_stands(run_script: ScriptRunner, heading: str) -> None:
    """The same for each program by itself, with what starts the ranks on the page."""
    need_installed("lightning", "transformers", "accelerate")
    result = run_script(FIRST + PROGRAMS[heading], timeout=180)
    assert result.returncode == 0, result
    assert lines_of(result.stdout) == [PRINTED[heading]], result
