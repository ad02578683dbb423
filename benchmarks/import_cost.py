"""Print the CPU time that importing rankwise, or an installed peer, adds to `import torch`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

MEASURE = """
import json, sys, time
{before}
start = time.process_time()
{statement}
print(json.dumps([time.process_time() - start, "torch._dynamo" in sys.modules]))
"""


@dataclass(frozen=True)
class Cost:
    """CPU time of one statement, in seconds, and whether it imported `torch._dynamo` (which takes 0.8 s)."""

    seconds: float
    imports_dynamo: bool


@dataclass(frozen=True)
class Contestant:
    """A statement, the package that it needs, and what runs before the clock starts."""

    statement: str
    package: str
    before: str = "import torch"

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None


CONTESTANTS = (
    Contestant("import torch", "torch", before=""),
    Contestant("import rankwise", "rankwise"),
    Contestant("from rankwise import Trainer, DDPStrategy", "rankwise"),
    Contestant("import accelerate", "accelerate"),
    Contestant("import lightning.pytorch", "lightning"),
)


def measure(contestant: Contestant) -> Cost:
    """Run the statement in a fresh interpreter."""
    program = MEASURE.format(before=contestant.before, statement=contestant.statement)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    output = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    seconds, imports_dynamo = json.loads(output.splitlines()[-1])
    return Cost(seconds, imports_dynamo)


def median(costs: list[Cost]) -> Cost:
    """Return the median time of several runs of one statement."""
    return Cost(statistics.median(cost.seconds for cost in costs), costs[0].imports_dynamo)


def main() -> None:
    """Measure every contestant in turn, several times over, so that other load affects all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="fresh processes per statement")
    repeats = parser.parse_args().repeats
    costs: dict[Contestant, list[Cost]] = {
        contestant: [] for contestant in CONTESTANTS if contestant.is_installed
    }
    for contestant in costs:
        measure(contestant)  # warms the disk cache, and writes the .pyc files
    for _ in range(repeats):
        for contestant, measured in costs.items():
            measured.append(measure(contestant))

    print(f"CPU time, median of {repeats} fresh processes; all but the first: beyond `import torch`\n")
    for contestant in CONTESTANTS:
        if contestant not in costs:
            print(f"{contestant.statement:<44} {'not installed':>14}")
            continue
        cost = median(costs[contestant])
        dynamo = "imports torch._dynamo" if cost.imports_dynamo else ""
        print(f"{contestant.statement:<44} {cost.seconds * 1000:11.1f} ms  {dynamo}".rstrip())


if __name__ == "__main__":
    main()
