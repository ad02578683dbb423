"""What docs/migrating.md and docs/gradients.md say to write can be written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise import gradient_sync

DOCS = Path(__file__).parents[2] / "docs"


def ours(heading: str) -> list[str]:
    """Return the right column's code in the section under a heading."""
    text = (DOCS / "migrating.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1)[1] for line in section.splitlines() if line.startswith("| `")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


NAMES: dict[str, Any] = {
    **{name: getattr(rankwise, name) for name in ("DDPStrategy",)},
    **{name: getattr(gradient_sync, name) for name in gradient_sync.__all__},
    "state": None,
    "hook": lambda state, bucket: None,
    "wrapper": lambda hook: hook,
}
STRATEGIES = [code for code in ours("Gradients") if code.startswith("DDPStrategy(") and '"mine:' not in code]
CODE = [
    code
    for code in ours("Gradients")
    if code not in STRATEGIES and code.startswith(("with ", "def ", "from "))
]


@pytest.mark.parametrize("code", sorted(set(STRATEGIES)))
def test_strategies_can_be_made(code: str) -> None:
    """Every `DDPStrategy(...)` takes what it is given there."""
    if "comm_state=state" in code:
        code = code.replace("comm_state=state", "comm_state=object()")
    assert isinstance(eval(code, dict(NAMES)), rankwise.DDPStrategy)


@pytest.mark.parametrize("code", sorted(set(CODE)))
def test_code_is_code(code: str) -> None:
    """What else stands there is Python, and the methods it calls exist."""
    compile(code, "migrating.md", "exec")
    for method in re.findall(r"strategy\.(\w+)", code):
        assert callable(getattr(rankwise.DDPStrategy, method))


def test_every_hook_is_described() -> None:
    """docs/gradients.md has every named hook, mode and weighting."""
    text = (DOCS / "gradients.md").read_text()
    known = [*gradient_sync.CommHookRegistry, *(mode.value for mode in gradient_sync.GradientSyncMode)]
    assert [name for name in [*known, "samples", "logged"] if f'`"{name}"`' not in text] == []
