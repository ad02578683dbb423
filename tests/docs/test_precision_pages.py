"""docs/precision.md is complete; the code on the Trainer and precision in docs/migrating works."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise import precision
from rankwise.trainer.module import TrainerOptimizer
from tests.docs.test_migrating import ours

DOCS = Path(__file__).parents[2] / "docs"
NAMES: dict[str, Any] = {
    **{name: getattr(precision, name) for name in precision.__all__},
    "DDPStrategy": rankwise.DDPStrategy,
    "Trainer": rankwise.Trainer,
    "timedelta": timedelta,
}
CODE = sorted({code for heading in ("Trainer", "Precision", "Manual optimisation") for code in ours(heading)})
MADE = [code for code in CODE if code.startswith(("Trainer(", "DDPStrategy(")) and "cuda" not in code]


@pytest.mark.filterwarnings("ignore:barebones=True")  # says that nothing is logged
@pytest.mark.parametrize("code", MADE)
def test_arguments_are_taken(code: str) -> None:
    """Every `Trainer(...)` and `DDPStrategy(...)` accepts its arguments."""
    assert eval(code, dict(NAMES)) is not None


@pytest.mark.parametrize("code", [code for code in CODE if re.search(r"\b(strategy|self|optimizer)\.", code)])
def test_methods_exist(code: str) -> None:
    """The methods of the strategy, its precision, the module and its optimizers exist."""
    owners = {
        r"strategy\.precision\.(\w+)": precision.Precision,
        r"strategy\.(\w+)\(": rankwise.Strategy,
        r"self\.(\w+)": rankwise.TrainingModule,
        r"optimizer\.(\w+)\(": TrainerOptimizer,
    }
    found = [(owner, name) for pattern, owner in owners.items() for name in re.findall(pattern, code)]
    assert found
    assert [name for owner, name in found if name not in dir(owner)] == []


def test_every_precision_is_described() -> None:
    """docs/precision.md has every class, and every name means what it says there."""
    text = (DOCS / "precision.md").read_text()
    classes = [name for name in precision.__all__ if name.endswith("Precision")]
    assert [name for name in classes if f"`{name}`" not in text] == []
    table = text.partition("## Which precision")[2].partition("Each is a class")[0]
    names = re.findall(r'^\| `"([\w-]+)"', table, re.MULTILINE)
    assert {precision.create_precision(name).name for name in names} == set(names)
