"""The command line of `python -m rankwise`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rankwise.doctor.examination import Wanted, examine
from rankwise.doctor.strategies import list_strategies

__all__ = ["main"]

_DESCRIPTION = """
Say who started this process, and which ranks, devices, back ends, start methods and addresses there are; let
the ranks that are there (or two local ones) meet and all-reduce; say what to fix. Start it as you start your
training: alone, or under torchrun, srun or mpirun.
"""


def main(arguments: Sequence[str]) -> int:
    """Run `doctor` or `strategies`; return the exit code: 0, 1 where something is wrong, 2 for a wrong call.

    Runs on: every rank; rank 0 prints.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.command == "strategies":
        sys.stdout.write(list_strategies(as_json=chosen.json))
        return 0
    return _doctor(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rankwise", description="What is here, and does it work?")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="examine this job and machine", description=_DESCRIPTION)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument("--no-collectives", action="store_true", help="start nothing, connect to nobody")
    doctor.add_argument("--no-start-methods", action="store_true", help="do not try each start method")
    doctor.add_argument(
        "--devices", default="auto", help="processes on each node (default: all there are, or 2)"
    )
    doctor.add_argument("--num-nodes", type=int, help="nodes (default: as many as there are)")
    doctor.add_argument(
        "--timeout", type=float, default=60.0, help="seconds that ranks may take (default: 60)"
    )
    strategies = commands.add_parser(
        "strategies", help="list the names of strategies and what they stand for"
    )
    strategies.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _doctor(chosen: argparse.Namespace) -> int:
    wanted = Wanted(
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        timeout_s=chosen.timeout,
        connects=not chosen.no_collectives,
        tries=not chosen.no_start_methods,
    )
    report, speaks = examine(wanted, os.environ)
    if speaks:
        sys.stdout.write(f"{report.to_json() if chosen.json else report.to_text()}\n")
    elif not report.is_healthy:
        # Rank 0 tells all; should it be the one that is missing, this is all that there is.
        sys.stderr.write("".join(f"{finding.what}\n" for finding in report.findings if finding.is_error))
    return 0 if report.is_healthy else 1
