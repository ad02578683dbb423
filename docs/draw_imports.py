"""Draw the folders of `src/rankwise` and their imports as an SVG file, `docs/pictures/imports.svg`.

python docs/draw_imports.py

An arrow leads from a folder to one that it imports. Not drawn are imports that other arrows imply (the
picture shows the transitive reduction of the graph), imports for type annotations only, and those of
files of basics, such as `start.py` and `errors.py`, which every folder may import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "rankwise"
PICTURE = DOCS / "pictures" / "imports.svg"

SUBJECTS = {
    "testing": "several ranks in tests",
    "doctor": "diagnoses a job",
    "lightning": "Lightning's names",
    "integrations": "inside other frameworks",
    "trainer": "the Trainer and its loops",
    "fabric": "for loops of your own",
    "callbacks": "called during training",
    "loggers": "record metrics",
    "profilers": "measure stages",
    "data": "split data over ranks",
    "registry": "the table of strategy names",
    "compatibility": "names, objects of others",
    "strategies": "how training is distributed",
    "checkpoint": "read and write checkpoints",
    "precision": "number formats",
    "launchers": "start and supervise ranks",
    "gradient_sync": "when gradients are averaged",
    "environments": "who started this process",
    "process_group": "the group, its collectives",
    "failures": "what failed first",
    "monitoring": "what each rank is doing",
    "processes": "operating-system helpers",
    "stores": "small values between ranks",
}
"""What each folder (or file, such as `registry.py`) is for."""

BASICS = (
    *("start", "time_limit", "errors", "checks", "ranks", "seed"),
    *("named_options", "nested", "hyperparameters", "paths", "torch_internals"),
)
NOT_DRAWN = (*BASICS, "__init__", "__main__")

BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW, MARGIN = 178, 44, 194, 86, 16
SWEEPS = 12
TEXT = 'fill="#222" stroke="none"'


def part_of(module: str) -> str:
    """Return the folder, or file, of a module: `data` for `rankwise.data.sampler`."""
    return (*module.split("."), "")[1]


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the modules of rankwise that run-time imports below `node` name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            names = [child.module, *(f"{child.module}.{alias.name}" for alias in child.names)]
            yield from names[1:] if child.module == "rankwise" else names[:1]
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from imported_modules(child)


def read_imports() -> dict[str, set[str]]:
    """Return what each folder imports.

    Raises:
        KeyError: if a folder has no line in `SUBJECTS`.
    """
    graph: dict[str, set[str]] = {part: set() for part in SUBJECTS}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part not in NOT_DRAWN:
            names = imported_modules(ast.parse(path.read_text()))
            imported = {part_of(name) for name in names if name.startswith("rankwise.")}
            graph[part] |= imported.difference({part, *NOT_DRAWN})
    return graph


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the boxes that `start` imports, directly or through others."""
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        part = pending.pop()
        if part not in found:
            found.add(part)
            pending.extend(graph[part])
    return found


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the imports that other imports imply."""
    implied = {part: set().union(*(reachable(graph, other) for other in graph[part])) for part in graph}
    return {part: graph[part] - implied[part] for part in graph}


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each folder's row: right below the lowest folder that imports it."""
    level = dict.fromkeys(graph, 0)
    for _ in graph:
        for part, targets in graph.items():
            level |= {target: max(level[target], level[part] + 1) for target in targets}
    return level


class Layout:
    """The rows of boxes, and for each arrow the places through which it passes.

    An arrow over several rows has a place of its own in each row between, so that it crosses no box.
    """

    def __init__(self, graph: Mapping[str, set[str]]) -> None:
        level = levels(graph)
        self.rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
        for part in graph:
            self.rows[level[part]].append(part)
        self.paths: list[list[str]] = []
        for part, targets in graph.items():
            for target in sorted(targets):
                between = {row: f"{part} {target} {row}" for row in range(level[part] + 1, level[target])}
                for row, place in between.items():
                    self.rows[row].append(place)
                self.paths.append([part, *between.values(), target])
        self.places: dict[str, tuple[float, float]] = {}
        self._place()
        for sweep in range(SWEEPS):
            self._sort(downwards=sweep % 2 == 0)

    def _place(self) -> None:
        widest = max(len(row) for row in self.rows)
        for number, row in enumerate(self.rows):
            for index, place in enumerate(row):
                x = MARGIN + COLUMN * (index + (widest - len(row)) / 2)
                self.places[place] = (x + BOX_WIDTH / 2, MARGIN + ROW * number)

    def _sort(self, *, downwards: bool) -> None:
        """Order each row by where the neighbours of its places are in the row before (or below)."""
        neighbours: dict[str, list[str]] = {}
        for path in self.paths:
            for upper, lower in pairwise(path):
                source, moved = (upper, lower) if downwards else (lower, upper)
                neighbours.setdefault(moved, []).append(source)
        for row in self.rows if downwards else reversed(self.rows):
            row.sort(key=lambda place: self._mean_x(neighbours.get(place, [place])))
            self._place()

    def _mean_x(self, places: list[str]) -> float:
        return sum(self.places[place][0] for place in places) / len(places)


def arrow(points: list[tuple[float, float]]) -> str:
    """Return an SVG path from the bottom of the first place, through the others, to the top of the last."""
    x, y = points[0]
    parts = [f"M{x:g} {y + BOX_HEIGHT:g}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        parts.append(f"C{x0:g} {y0 + BOX_HEIGHT + 26:g} {x1:g} {y1 - 26:g} {x1:g} {y1:g}")
        if (x1, y1) != points[-1]:
            parts.append(f"V{y1 + BOX_HEIGHT:g}")
    return f'<path d="{" ".join(parts)}"/>'


def box(part: str, x: float, y: float) -> str:
    """Return a folder's rectangle with its name and subject."""
    title = f"{part}.py" if part == "registry" else f"{part}/"
    return (
        f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x:g}" y="{y + 18:g}" {TEXT} font-weight="bold">{title}</text>'
        f'<text x="{x:g}" y="{y + 35:g}" {TEXT} font-size="11">{SUBJECTS[part]}</text>'
    )


def draw() -> str:
    """Return the picture."""
    layout = Layout(reduced(read_imports()))
    width = 2 * MARGIN + COLUMN * max(len(row) for row in layout.rows) - COLUMN + BOX_WIDTH
    bottom = MARGIN + ROW * len(layout.rows)
    arrows = [arrow([layout.places[place] for place in path]) for path in layout.paths]
    boxes = [box(part, *layout.places[part]) for part in SUBJECTS]
    basics = ", ".join(f"{part}.py" for part in BASICS)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom + BOX_HEIGHT + MARGIN:g}"',
        '  font-family="sans-serif" font-size="13" role="img"',
        '  aria-label="The folders of src/rankwise and what they import">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"',
        '  markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 10 5 0 10z" fill="#556"/></marker>',
        "</defs>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    wide_box = [
        f'<rect x="{MARGIN}" y="{bottom:g}" width="{width - 2 * MARGIN:g}" height="{BOX_HEIGHT}" rx="6"/>',
        f'<text x="{width / 2:g}" y="{bottom + 27:g}" {TEXT}>{basics}: every folder may import these</text>',
    ]
    lines = [
        *head,
        '<g fill="none" stroke="#556" stroke-width="1.3" marker-end="url(#tip)">',
        *arrows,
        "</g>",
        '<g fill="#f4f6fb" stroke="#667" text-anchor="middle">',
        *boxes,
        *wide_box,
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
