"""A report: sections of facts, and what to fix; as text, section by section, or as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

_WIDTH = 100


@final
@dataclass(frozen=True)
class Finding:
    """A problem, or a note that leaves the exit code at 0, and what to do about it."""

    what: str
    fix: str
    is_error: bool = True


@final
@dataclass(frozen=True)
class Section:
    """One part of a report: `key` and `facts` are for JSON, `title` and `lines` say the same as text."""

    key: str
    title: str
    facts: Any
    lines: Sequence[str]
    findings: Sequence[Finding] = ()


def announce(activity: str) -> None:
    """Print the current step to stderr, as it may take a while."""
    sys.stderr.write(f"doctor: {activity} ...\n")
    sys.stderr.flush()


@final
@dataclass
class Report:
    """All sections in order, and the next step if there is no error."""

    sections: list[Section] = field(default_factory=list)
    next_step: str = ""
    _as_json: bool | None = field(default=None, init=False)  # None: this process prints nothing

    def start_printing(self, *, as_json: bool) -> None:
        """Print the sections that are known, and from here on each that is added; JSON at the end only."""
        self._as_json = as_json
        self._print(self.sections)

    def add(self, *sections: Section) -> None:
        """Append sections."""
        self.sections += sections
        self._print(sections)

    def announce(self, activity: str) -> None:
        """Print the current step, if this report is printed."""
        if self._as_json is not None:
            announce(activity)

    def _print(self, sections: Sequence[Section]) -> None:
        if self._as_json is False:
            for section in sections:
                sys.stdout.write(f"{_block(section.title, section.lines)}\n\n")
            sys.stdout.flush()

    def finish(self) -> None:
        """Print what is known only at the end: what to fix, or all of the JSON."""
        sys.stdout.write(f"{self.to_json() if self._as_json else self.advice()}\n")
        sys.stdout.flush()

    @property
    def findings(self) -> list[Finding]:
        """All findings, errors first."""
        found = [finding for section in self.sections for finding in section.findings]
        return sorted(found, key=lambda finding: not finding.is_error)

    @property
    def is_healthy(self) -> bool:
        """Whether there is no error; notes do not count."""
        return not any(finding.is_error for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as JSON."""
        content: dict[str, Any] = {"ok": self.is_healthy}
        content |= {section.key: section.facts for section in self.sections}
        content["findings"] = [
            {"level": "error" if finding.is_error else "note", "what": finding.what, "fix": finding.fix}
            for finding in self.findings
        ]
        content["next_step"] = self.next_step
        return json.dumps(content, indent=2)

    def advice(self) -> str:
        """Return the last part of the text: what to fix, and the next step."""
        lines: list[str] = []
        for finding in self.findings:
            lines += _wrapped("WRONG: " if finding.is_error else "Note:  ", finding.what)
            lines += _wrapped("  Fix: ", finding.fix)
        if self.is_healthy:
            lines += _wrapped("", "Nothing is wrong." if self.findings else "Nothing.")
            lines += _wrapped("Next:  ", self.next_step)
        return _block("What to fix", lines)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
