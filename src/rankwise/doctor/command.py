"""The command line of `python -m rankwise`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rankwise.doctor.examination import Request, examine
from rankwise.doctor.strategies import list_strategies

__all__ = ["main"]

_DESCRIPTION = """
Report who started this process, and which ranks, devices, back ends, start methods and addresses there are;
run an all-reduce over the existing ranks (or two local ones); say what to fix. Start it as you start your
training: alone, or under torchrun, srun or mpirun.
"""


def main(arguments: Sequence[str]) -> int:
    """Run `doctor` or `strategies`; return the exit code: 0, 1 for a problem, 2 for invalid arguments.

    Runs on: every rank; rank 0 prints.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.command == "strategies":
        sys.stdout.write(list_strategies(as_json=chosen.json))
        return 0
    return _doctor(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rankwise", description="Diagnose jobs, list strategies.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="examine this job and machine", description=_DESCRIPTION)
    strategies = commands.add_parser("strategies", help="list the names of strategies and their meaning")
    for command in (doctor, strategies):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument("--no-collectives", action="store_true", help="start no process and connect nowhere")
    doctor.add_argument("--no-start-methods", action="store_true", help="do not try each start method")
    doctor.add_argument("--devices", default="auto", help="processes per node (default: all there are, or 2)")
    doctor.add_argument("--num-nodes", type=int, help="nodes (default: all there are)")
    doctor.add_argument("--timeout", type=float, default=60.0, help="limit in seconds (default: 60)")
    return parser


def _doctor(chosen: argparse.Namespace) -> int:
    request = Request(
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        timeout_s=chosen.timeout,
        runs_collectives=not chosen.no_collectives,
        tries_start_methods=not chosen.no_start_methods,
    )
    report, is_printed = examine(request, os.environ)
    if is_printed:
        sys.stdout.write(f"{report.to_json() if chosen.json else report.to_text()}\n")
    elif not report.is_healthy:
        # Rank 0 prints the report; if rank 0 is missing, this is the only output.
        sys.stderr.write("".join(f"{finding.what}\n" for finding in report.findings if finding.is_error))
    return 0 if report.is_healthy else 1
