"""Submit the doctor, then the digits, to Slurm from Python: two nodes, a task each; print what rank 0 prints.

pip install submitit
python examples/slurm/submitit_digits.py FOLDER_THAT_ALL_NODES_SEE
"""

from __future__ import annotations

import sys
from pathlib import Path

import submitit

DIGITS = Path(__file__).parents[1] / "digits.py"


def main() -> None:
    """Submit, wait, print; first the doctor, whose failure ends it."""
    folder, *arguments = sys.argv[1:]
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    executor.update_parameters(name="digits", nodes=2, tasks_per_node=1, timeout_min=10)
    for program in (["-m", "rankwise", "doctor"], [str(DIGITS), *arguments]):
        command = submitit.helpers.CommandFunction([sys.executable, *program], verbose=False)
        print(executor.submit(command).results()[0])


if __name__ == "__main__":
    main()
