"""Measure everything, or the questions that are asked for, and print the results; see `--help`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

from benchmarks import progress
from benchmarks.cleanup import end_programs_with_this_process
from benchmarks.programs import REPOSITORY, ProgramError
from benchmarks.results import Result, machine, write_json
from benchmarks.sampling import QUICK, Sampling

QUESTIONS = {
    "step": ("step", "the time of a training step"),
    "import": ("imports", "what importing adds to `import torch`"),
    "launch": ("launch", "from a script's start to its first step and to its end"),
    "memory": ("memory", "the memory of a job of two ranks"),
    "collectives": ("collectives", "gathering tensors of different shapes"),
    "gradient_sync": ("gradient_sync", "averaging gradients"),
    "rank_comparison": ("rank_comparison", "comparing the ranks, beside an epoch of training"),
    "state_return": ("state_return", "bringing the trained model back to the caller"),
    "faults": ("faults.question", "how long a failed job takes to end"),
    "scale": ("scale", "what grows with the number of ranks, simulated in one process"),
    "gpu_step": ("gpu_step", "the time of a training step on a GPU; only when it is named"),
}
"""By name: the module here whose `measure` answers it, and what it is."""
ONLY_BY_NAME = {"gpu_step"}  # measured on another machine than the rest


def main() -> int:
    """Run the questions; return 1 if one could not be measured."""
    options = _parser().parse_args()
    end_programs_with_this_process()
    try:
        return _measure(options)
    except KeyboardInterrupt:
        os._exit(130)  # without waiting for the threads that measure


def _measure(options: argparse.Namespace) -> int:
    sampling = QUICK if options.quick else Sampling.of_rounds(options.rounds)
    content = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "command": _command()}
    results = []
    pool = ThreadPoolExecutor(
        2 if options.quick else 1
    )  # no context: an interrupt would wait for its threads
    questions = options.questions or [name for name in QUESTIONS if name not in ONLY_BY_NAME]
    # Before the threads: two of them cannot import torch at once.
    modules = [importlib.import_module(f"benchmarks.{QUESTIONS[name][0]}") for name in questions]
    for result in pool.map(partial(_answer, sampling=sampling), questions, modules):
        print(result, flush=True)
        results.append(result)
        if options.json is not None:
            write_json(options.json, content, [result])
    return 1 if any(result.failed for result in results) else 0


def _answer(name: str, module: ModuleType, sampling: Sampling) -> Result:
    if not sampling.is_quick:
        progress.begin(name)
    try:
        result: Result = module.measure(sampling)
    except ProgramError as error:
        return Result(name, [], failed={name: str(error)})
    return result


def _command() -> str:
    return " ".join(["python -m benchmarks", *sys.argv[1:]]).replace(f"{REPOSITORY}/", "")


def _question(name: str) -> str:
    """Check a question's name: argparse would compare an empty list of them with its choices."""
    if name not in QUESTIONS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(QUESTIONS)}")
    return name


def _parser() -> argparse.ArgumentParser:
    questions = "\n".join(f"  {name:14} {what}" for name, (_, what) in QUESTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\nquestions:\n{questions}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="question",
        type=_question,
        help="what to measure; all by default",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run everything once, small: it shows that it works"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="how often contenders take turns (default: 15)"
    )
    parser.add_argument(
        "--json", type=Path, help="a file for each result, once it is there; those of other questions stay"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
