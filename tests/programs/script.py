"""A script that runs programs of two ranks: `python script.py FOLDER`, which launches itself, or torchrun."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from rankwise import DDPStrategy
from tests.programs.on_ranks import run_job


def strategy(**options: Any) -> DDPStrategy:
    """Return the strategy of a script."""
    return DDPStrategy(accelerator="cpu", devices=2, **options)


def main(folder: Path) -> None:
    """Run the programs of `programs.pkl`; write what this rank has after each action."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    programs = pickle.loads((folder / "programs.pkl").read_bytes())
    for number, program in enumerate(programs):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        outcomes = [run_job(program, job, own, strategy, rank) for job in program.jobs]
        (own / f"rank{rank}.pkl").write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
