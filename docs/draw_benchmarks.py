"""Write the tables and pictures of the pages about benchmarks from `docs/benchmarks.json`.

python docs/draw_benchmarks.py

`python -m benchmarks --json docs/benchmarks.json` measures. Each result stands between two comments in one of
`PAGES`, `<!-- QUESTION -->` and `<!-- /QUESTION -->`. If it was not measured, a sentence there says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "benchmarks.json"
PAGES = tuple(DOCS / name for name in ("benchmarks.md", "benchmarks_communication.md", "scaling.md"))
PICTURES = DOCS / "pictures"
BUSY = 0.75  # load per core: more than that is a busy machine

COLOURS = {"raw torch": "#889", "rankwise": "#2a6fdb", "rankwise ddp": "#2a6fdb"}
OTHER = "#c9ccd6"
NAMES, WIDTH, BAR, GAP, TITLE, MARGIN = 210, 700, 16, 6, 26, 12

Result = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def number(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cases_of(result: Result) -> dict[str, Rows]:
    """Return the rows of each case."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
    return dict(cases)


def table(result: Result) -> list[str]:
    """Return the lines of a result's table."""
    has_ratios = any(row["ratio"] for row in result["rows"])
    has_notes = any(row["note"] for row in result["rows"])
    header = ["case", "contender", "median"]
    header += ["ratio", "quartiles"] if has_ratios else []
    header += ["note"] if has_notes else []
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for case, rows in cases_of(result).items():
        for place, row in enumerate(rows):
            cells = [
                case if place == 0 else "",
                row["contender"],
                f"{number(row['median'])} {row['unit']}".strip(),
            ]
            if has_ratios and (ratio := row["ratio"]):
                cells += [f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"]
            elif has_ratios:
                cells += ["", ""]
            cells += [row["note"]] if has_notes else []
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def conditions(result: Result) -> list[str]:
    """Return the lines that say when, where and how a result was measured."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rounds = max((row["rounds"] for row in result["rows"]), default=0)
    how = (
        f"`{result['command']}` on {result['date']}, {rounds} round{'s' if rounds != 1 else ''}; {versions}; "
    )
    lines = [f"{how}{machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB."]
    if machine["load"] > BUSY * machine["cores"]:
        lines.append(
            f"**A load of {machine['load']} on {machine['cores']} cores when this began.** If that is from "
            "other programs, and not from the question before, wall times are longer and vary more."
        )
    lines += [f"Not installed: {', '.join(result['absent'])}."] if result["absent"] else []
    return lines + [f"Failed: {name}." for name in result["failed"]]


def picture(question: str, result: Result) -> str:
    """Return a picture of the ratios to the first contender, with their quartiles; nothing without ratios."""
    cases = {
        case: [row for row in rows if row["ratio"]]
        for case, rows in cases_of(result).items()
        if rows[0]["ratio"] and not case.endswith("processor time")
    }
    if not cases:
        return ""
    longest = max(row["ratio"]["high"] for rows in cases.values() for row in rows)
    scale = (WIDTH - NAMES - 70) / longest
    parts, y = [], MARGIN
    for case, rows in cases.items():
        parts.append(f'<text x="{MARGIN}" y="{y + 16}" font-weight="bold">{escape(case)}</text>')
        y += TITLE
        for row in rows:
            parts += bar(row, y, scale)
            y += BAR + GAP
        y += GAP
    one = NAMES + scale
    line = f'<path d="M{one:.1f} {MARGIN} V{y}" stroke="#555" stroke-dasharray="3 3"/>'
    label = f"{question}: ratios to raw torch, or to the first contender of each case; less is better"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN}"',
            f'  font-family="sans-serif" font-size="12" role="img" aria-label="{label}">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *parts,
            line,
            "</svg>",
            "",
        ]
    )


def bar(row: Mapping[str, Any], y: float, scale: float) -> list[str]:
    """Return a contender's name, its bar, and a line over its quartiles."""
    ratio, colour = row["ratio"], COLOURS.get(row["contender"], OTHER)
    low, high = (NAMES + scale * ratio[end] for end in ("low", "high"))
    middle, end = y + BAR / 2, NAMES + scale * ratio["median"]
    return [
        f'<text x="{NAMES - 8}" y="{y + 12}" text-anchor="end">{escape(row["contender"])}</text>',
        f'<rect x="{NAMES}" y="{y}" width="{end - NAMES:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<path d="M{low:.1f} {middle} H{high:.1f}" stroke="#222"/>',
        f'<text x="{max(high, end) + 6:.1f}" y="{y + 12}">{ratio["median"]:.2f}</text>',
    ]


def section(question: str, result: Result | None) -> list[str]:
    """Return what the page has between the comments of a question."""
    if result is None:
        return ["Not measured yet on an idle machine."]
    image = [f"![ratios](pictures/benchmark_{question}.svg)", ""] if picture(question, result) else []
    return [*conditions(result), "", *image, *table(result)]


def pages() -> dict[Path, str]:
    """Return the text of each page and picture."""
    results: dict[str, Result] = json.loads(RESULTS.read_text())["results"]
    written = {}
    for path in PAGES:

        def replaced(match: re.Match[str]) -> str:
            question = match[1]
            content = "\n".join(section(question, results.get(question)))
            return f"<!-- {question} -->\n{content}\n<!-- /{question} -->"

        written[path] = re.sub(
            r"<!-- (\w+) -->\n.*?<!-- /\1 -->", replaced, path.read_text(), flags=re.DOTALL
        )
    for question, result in results.items():
        if image := picture(question, result):
            written[PICTURES / f"benchmark_{question}.svg"] = image
    return written


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
