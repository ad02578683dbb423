"""Print the result of the same failures under rankwise, Lightning, torchrun and torch.multiprocessing.

Printed for each: the seconds from the fault until every process was gone (or that some were not), the exit
code, the type of the caller's exception, whether the failed rank is named, and what was left.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from concurrent.futures import ThreadPoolExecutor

from benchmarks.faults.job import Job
from benchmarks.faults.observing import CONTENDERS, observe, taking_part
from tests.process.fault_table import HOW, WHEN, WHO


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--who", nargs="+", default=WHO, choices=WHO)
    parser.add_argument("--how", nargs="+", default=HOW, choices=HOW)
    parser.add_argument("--when", nargs="+", default=WHEN, choices=WHEN)
    parser.add_argument(
        "--most", type=float, default=20.0, help="seconds after which a job counts as hanging"
    )
    parser.add_argument("--at-once", type=int, default=1, help="how many jobs to run at a time")
    options = parser.parse_args()
    names = taking_part(options.contenders)
    cells = list(itertools.product(options.who, options.how, options.when))
    print(f"| who | how | when | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        jobs = [
            Job(name, *cell, folder=f"{folder}/{number}-{names.index(name)}")
            for number, cell in enumerate(cells)
            for name in names
        ]
        results = pool.map(lambda job: observe(job, options.most), jobs)
        for cell in cells:
            row = ["-" if one is None else str(one) for one in itertools.islice(results, len(names))]
            print(f"| {' | '.join([*cell, *row])} |", flush=True)


if __name__ == "__main__":
    main()
