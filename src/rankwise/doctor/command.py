"""The command line of `python -m rankwise`, and the command `strategies`."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.doctor.report import announce, table
from rankwise.ranks import rank_zero_only

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
    if chosen.command == "doctor":
        return _doctor(chosen)
    strategies = _strategies()
    text = f"{json.dumps(strategies, indent=2, default=str)}\n" if chosen.json else _as_text(strategies)
    sys.stdout.write(text)
    return 0


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
    if getattr(rank_zero_only, "rank", 0) == 0:
        announce("importing torch")
    from rankwise.doctor.examination import examine

    report, is_printed = examine(
        os.environ,
        devices=chosen.devices,
        num_nodes=chosen.num_nodes,
        timeout_s=chosen.timeout,
        runs_collectives=not chosen.no_collectives,
        tries_start_methods=not chosen.no_start_methods,
        as_json=chosen.json,
    )
    if is_printed:
        report.finish()
    elif not report.is_healthy:
        # Rank 0 prints the report; if rank 0 is missing, this is the only output.
        sys.stderr.write("".join(f"{finding.what}\n" for finding in report.findings if finding.is_error))
    return 0 if report.is_healthy else 1


_USE = (
    'Use a name: Trainer(strategy="ddp_spawn"). Arguments: StrategyRegistry.create("ddp_spawn", timeout=120).'
)


def _strategies() -> dict[str, dict[str, Any]]:
    from rankwise.registry import StrategyRegistry
    from rankwise.strategies import SingleDeviceStrategy

    content = {}
    for name in StrategyRegistry:
        entry = StrategyRegistry.entry(name)
        starts_none = entry.strategy is SingleDeviceStrategy
        default = None if starts_none else entry.strategy.default_start_method
        content[name] = {
            "class": entry.strategy.__name__,
            "start_method": entry.init_params.get("start_method", default),
            "description": entry.description,
            "arguments": entry.init_params,
            "defaults": _defaults(entry.strategy),
        }
    return content


def _as_text(strategies: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    classes: dict[str, dict[str, None]] = {}  # by the arguments and defaults that they share
    for name, each in strategies.items():
        meaning = f"{each['class']}({_arguments(each['arguments'])})"
        rows.append((name, meaning, each["start_method"] or "-", each["description"]))
        classes.setdefault(_arguments(each["defaults"]), {})[each["class"]] = None
    lines = [*table(("name", "stands for", "start method", "description"), rows), ""]
    for defaults, names in classes.items():
        lines += textwrap.wrap(f"{', '.join(names)}: {defaults}", 110, subsequent_indent="    ")
    return "".join(f"{line}\n" for line in [*lines, "", _USE])


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value!r}" if isinstance(value, str) else f"{key}={value}" for key, value in values.items()
    )


def _defaults(cls: type) -> dict[str, Any]:
    """Return a constructor's keywords and defaults, including those that it forwards to a base class."""
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        given = {each.name: each.default for each in parameters if each.default is not each.empty}
        defaults = {**given, **defaults}
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    return defaults
