"""docs/from_lightning.md: its program runs, its table of modules is true, its command changes imports."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks
from tests.helpers.scripts import ScriptRunner

PAGE = (DOCS / "from_lightning.md").read_text()
PROGRAM, ON_TWO = blocks(PAGE)
ROWS = re.findall(r"^\| (`.*) \| (.*) \|$", PAGE, re.MULTILINE)
MODULES = {re.findall(r"`(.*?)`", left)[0]: right for left, right in ROWS if left.startswith("`rankwise.")}
IMPORTS = [row for row in ROWS if row[1].startswith(("`import", "`from", "`_target_"))]


@pytest.mark.parametrize(
    "where", [pytest.param("devices=1", marks=pytest.mark.soak), 'devices=2, strategy="ddp_fork"']
)
def test_the_program(run_script: ScriptRunner, where: str) -> None:
    """The program trains, on one process and with the page's arguments on two."""
    assert PROGRAM.count("devices=1") == ON_TWO.count('devices=2, strategy="ddp_fork"') == 1
    result = run_script(PROGRAM.replace("devices=1", where))
    assert result.returncode == 0, result
    [accuracy, *_] = re.findall(r"val_acc (\S+)", result.stdout)
    assert float(accuracy) > 0.6, result


def test_the_command(tmp_path: Path) -> None:
    """The command changes imports as the table shows, in programs and configurations, and nothing else."""
    [command] = blocks(PAGE, "bash")
    before, after = (
        [code for pair in IMPORTS for code in re.findall(r"`(.*?)`", pair[side])] for side in (0, 1)
    )
    before.remove("import pytorch_lightning as pl")  # the second on its line
    other = ["import lightning_utilities", "x = lightning(1)", "from torch import nn"]
    other.append("    import lightning as L")
    (tmp_path / "train.py").write_text("\n".join([*before, *other, "import pytorch_lightning as pl"]))
    (tmp_path / "config.yaml").write_text("_target_: lightning.pytorch.Trainer\n")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=60)
    other[-1] = "    import rankwise.lightning as L"
    expected = [*after, *other, "import rankwise.lightning as pl"]
    assert (tmp_path / "train.py").read_text().splitlines() == expected
    assert (tmp_path / "config.yaml").read_text() == "_target_: rankwise.lightning.Trainer\n"


@pytest.mark.parametrize(("module", "names"), MODULES.items())
def test_modules(module: str, names: str) -> None:
    """What the table of modules names exists."""
    found = importlib.import_module(module)
    missing = [name for name in re.findall(r"`(\w+)`", names) if getattr(found, name, None) is None]
    assert missing == []
