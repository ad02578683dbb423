"""Submit the digits to Slurm from Python: two nodes, one task on each; wait, and print what rank 0 printed.

pip install submitit
python examples/slurm/submitit_digits.py FOLDER_THAT_ALL_NODES_SEE
"""

from __future__ import annotations

import sys
from pathlib import Path

import submitit

DIGITS = Path(__file__).parents[1] / "digits.py"


def main() -> None:
    """Submit, wait, print."""
    folder, *arguments = sys.argv[1:]
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(name="digits", nodes=2, tasks_per_node=1, timeout_min=10)
    command = [sys.executable, str(DIGITS), *arguments]
    job = executor.submit(submitit.helpers.CommandFunction(command, verbose=False))
    print(job.results()[0])


if __name__ == "__main__":
    main()
