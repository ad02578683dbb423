"""Print the table of failures as it was seen: the seconds from a fault until its last process was gone.

python -m pytest -m "soak or not soak" tests/process/test_fault_matrix.py -k test_fault --junitxml faults.xml
python -m tests.process.fault_report faults.xml
"""

import itertools
import json
import sys
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from tests.process.fault_table import HOW, STRATEGIES, WHEN, WHO, Cell, expected


def read(path: str) -> Iterator[tuple[Cell, str]]:
    for case in ET.parse(path).iter("testcase"):
        recorded = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if "cell" in recorded:
            seconds = f"{float(recorded['gone_after_s']):.1f}"
            has_failed = case.find("failure") is not None
            yield Cell(**json.loads(recorded["cell"])), f"**{seconds}**" if has_failed else seconds


def lines(seen: dict[Cell, str]) -> Iterator[str]:
    """Yield the table: a line for who, how and when; a column for each strategy; what comes of it."""
    yield f"| who | how | when | {' | '.join(STRATEGIES)} | what the caller gets |"
    yield "|---" * (4 + len(STRATEGIES)) + "|"
    for who, how, when in itertools.product(WHO, HOW, WHEN):
        cells = [Cell(who, how, when, strategy) for strategy in STRATEGIES]
        if any(cell in seen for cell in cells):
            times = " | ".join(seen.get(cell, "-") for cell in cells)
            results = dict.fromkeys(result(cell) for cell in cells if cell in seen)
            yield f"| {who} | {how} | {when} | {times} | {'; or '.join(results)} |"


def result(cell: Cell) -> str:
    due = expected(cell)
    rank = "" if due.rank is None else f" of rank {due.rank}"
    code = f"killed by signal {-due.exit_code}" if due.exit_code < 0 else f"exit {due.exit_code}"
    return f"{due.exception}{rank}, {code}" if due.exception else code


if __name__ == "__main__":
    print("\n".join(lines(dict(read(sys.argv[1])))))
