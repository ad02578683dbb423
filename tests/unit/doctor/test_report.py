"""A report says what to fix, errors first, and what to do next where nothing is wrong."""

from __future__ import annotations

import json

from rankwise.doctor import Finding, Report, Section
from rankwise.doctor.report import table

NOTE = Finding("A thing is odd.", "look at it.", is_error=False)
ERROR = Finding("A thing is broken.", "mend it.")


def report(*findings: Finding) -> Report:
    return Report([Section("things", "Things", {"count": 2}, ["two things"], findings)], "go on.")


def test_errors_come_first() -> None:
    """The advice starts with what is wrong, whichever section found it first."""
    text = report(NOTE, ERROR).to_text()
    advice = text[text.index("What to fix") :].splitlines()
    assert advice == [
        "What to fix",
        "  WRONG: A thing is broken.",
        "    Fix: mend it.",
        "  Note:  A thing is odd.",
        "    Fix: look at it.",
    ]


def test_a_note_is_healthy() -> None:
    """A note leaves the report healthy, and the next step is said."""
    noted = report(NOTE)
    assert noted.is_healthy
    assert noted.to_text().endswith("  Nothing is wrong.\n  Next:  go on.")


def test_an_error_is_not() -> None:
    """With an error there is no next step but the fix."""
    broken = report(ERROR)
    assert not broken.is_healthy
    assert "Next:" not in broken.to_text()


def test_json_has_all() -> None:
    """Programs get the facts and the findings."""
    content = json.loads(report(ERROR, NOTE).to_json())
    assert content == {
        "ok": False,
        "things": {"count": 2},
        "findings": [
            {"level": "error", "what": "A thing is broken.", "fix": "mend it."},
            {"level": "note", "what": "A thing is odd.", "fix": "look at it."},
        ],
        "next_step": "go on.",
    }


def test_tables_are_aligned() -> None:
    """Columns are as wide as their widest cell."""
    assert table(("a", "bbb"), [(10, 2), (3, "")]) == ["a   bbb", "10  2", "3"]
