"""What a question's measurements are: rows, which are printed, and written as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paired import Figures, Ratio

PACKAGES = ("rankwise", "torch", "lightning", "accelerate", "pytorch-ignite", "torchrunx", "tqdm")


@dataclass(frozen=True)
class Row:
    """One contender in one case: the median of a quantity, and its ratio to the case's first contender.

    `ratio` is None where there is nothing to divide by.
    """

    case: str
    contender: str
    median: float
    unit: str
    ratio: Ratio | None
    rounds: int
    note: str = ""

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Row:
        """Return the row of what `to_json` returned."""
        ratio = fields["ratio"]
        return cls(**{**fields, "ratio": None if ratio is None else Ratio(**ratio)})

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = ""
        if self.ratio is not None:
            ratio = f"{self.ratio.median:6.2f} ({self.ratio.low:.2f} to {self.ratio.high:.2f})"
        return f"    {self.contender:28} {shown(self.median):>8} {self.unit:4} {ratio} {self.note}".rstrip()


@dataclass(frozen=True)
class Result:
    """What a question's measurement has given.

    Attributes:
        absent: contenders that are not installed.
        failed: for each contender that failed, why.
    """

    question: str
    rows: Sequence[Row]
    absent: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.question]
        for case in dict.fromkeys(row.case for row in self.rows):
            lines += [f"  {case}", *(str(row) for row in self.rows if row.case == case)]
        lines += [f"  not installed: {', '.join(self.absent)}"] if self.absent else []
        lines += [f"  FAILED: {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)


def rows_of(
    case: str, unit: str, samples: Mapping[str, Sequence[float]], *, has_ratios: bool = True
) -> list[Row]:
    """Return the rows of a case from each contender's samples; ratios are to the first contender."""
    first = next(iter(samples.values()), ())
    return [
        Row(case, name, statistics.median(own), unit, Ratio.of(own, first) if has_ratios else None, len(own))
        for name, own in samples.items()
    ]


def rows_of_figures(case: str, figures: Figures) -> list[Row]:
    """Return the rows of a case that was timed on the ranks of a job: wall time and processor time."""
    clock = [Row(case, name, f.wall_s * 1e3, "ms", f.wall, f.rounds) for name, f in figures.items()]
    title = f"{case}, processor time"
    return clock + [
        Row(title, name, f.processor_s * 1e3, "ms", f.processor, f.rounds) for name, f in figures.items()
    ]


def shown(number: float) -> str:
    """Return a number with three digits that count."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def machine() -> dict[str, Any]:
    """Return what the figures depend on: versions, cores, and how busy the machine is; no names of hosts."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "versions": versions,
        "system": f"{platform.system()} {platform.release().split('-')[0]} on {platform.machine()}",
        "cores": cores,
        "memory_gib": round(memory, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def write_json(path: Path, content: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write results, with what they depend on; results of other questions in the file stay."""
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    found = {result.question: {**content, **asdict(result)} for result in results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"results": {**before, **found}}, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` has written, by question."""
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found
