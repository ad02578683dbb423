"""A report says what to fix, errors first, and what to do next where nothing is wrong."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

from rankwise.doctor import Finding, Report, Section
from rankwise.doctor.report import table

NOTE = Finding("A thing is odd.", "look at it.", is_error=False)
ERROR = Finding("A thing is broken.", "mend it.")


def report(*findings: Finding) -> Report:
    return Report([Section("things", "Things", {"count": 2}, ["two things"], findings)], "go on.")


def test_errors_come_first() -> None:
    """The advice starts with what is wrong, whichever section found it first."""
    assert report(NOTE, ERROR).advice().splitlines() == [
        "What to fix",
        "  WRONG: A thing is broken.",
        "    Fix: mend it.",
        "  Note:  A thing is odd.",
        "    Fix: look at it.",
    ]


def test_a_note_is_healthy() -> None:
    """A note leaves the report healthy, and the next step is said; with an error that is the fix alone."""
    noted = report(NOTE)
    assert noted.is_healthy
    assert noted.advice().endswith("  Nothing is wrong.\n  Next:  go on.")
    broken = report(ERROR)
    assert not broken.is_healthy
    assert "Next:" not in broken.advice()


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


def printed(as_json: bool | None) -> list[str]:
    """Return what is on the screen after each step of a report that is made section by section."""
    shown, screen = list[str](), io.StringIO()
    made = Report([Section("first", "First", {}, ["one"])])
    with redirect_stdout(screen), redirect_stderr(screen):
        if as_json is not None:
            made.start_printing(as_json=as_json)
        shown.append(screen.getvalue())
        made.announce("measuring")
        shown.append(screen.getvalue())
        made.add(Section("second", "Second", {}, ["two"], [ERROR]))
        shown.append(screen.getvalue())
        if as_json is not None:
            made.finish()
    return [*shown, screen.getvalue(), made.advice(), made.to_json()]


def test_sections_are_printed_as_they_come() -> None:
    """Each is on the screen before the next is measured, which is said before; other ranks print nothing."""
    first, measuring, second, complete, advice, _ = printed(as_json=False)
    assert first == "First\n  one\n\n"
    assert measuring == f"{first}doctor: measuring ...\n"
    assert second == f"{measuring}Second\n  two\n\n"
    assert complete == f"{second}{advice}\n"
    assert printed(None)[:4] == [""] * 4


def test_json_is_printed_at_once() -> None:
    """With JSON there is nothing but progress before the report is complete."""
    first, measuring, second, complete, _, as_json = printed(as_json=True)
    assert [first, measuring, second] == ["", "doctor: measuring ...\n", measuring]
    assert complete == f"{measuring}{as_json}\n"


def test_tables_are_aligned() -> None:
    """Columns are as wide as their widest cell."""
    assert table(("a", "bbb"), [(10, 2), (3, "")]) == ["a   bbb", "10  2", "3"]
