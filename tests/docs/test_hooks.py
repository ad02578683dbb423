"""The table of docs/hooks.md is the table in the code."""

import re
from pathlib import Path
from typing import Any

import rankwise
from rankwise.callbacks import Callback
from rankwise.trainer.hooks import HOOKS, Hook

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"


def row(hook: Hook) -> str:
    """Return a hook's line of the page."""
    arguments = hook.arguments.replace("?", "")
    note = " Automatic optimisation only." if hook.is_automatic else ""
    return f"| `{hook.name}({arguments})` | {', '.join(hook.owners)} | {hook.moment}{note} |"


def test_the_table_is_the_codes() -> None:
    """Every hook has its line, in the order of the code."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [row(hook) for hook in HOOKS]


def test_the_examples_run() -> None:
    """The classes of the page can be defined."""
    names: dict[str, Any] = {"TrainingModule": rankwise.TrainingModule, "Callback": Callback}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)  # the page's own code
    assert "on_exception" in vars(names["SaveOnFailure"])
    assert "optimizer_step" in vars(names["WarmUp"])
    assert "on_fit_start" in vars(names["OnlineEvaluator"])
