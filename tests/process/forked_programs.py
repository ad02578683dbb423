"""Run programs in forks of one process that has imported what they need, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.helpers.scripts import ScriptResult, ScriptRunner

SERVER = Path(__file__).with_name("forking_program.py")


@dataclass(frozen=True)
class ForkedProgram:
    """A Python file, in whose folder it runs, its arguments, and variables to add."""

    path: Path
    args: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def run_forked(
    run_script: ScriptRunner, modules: Sequence[str], groups: Sequence[Sequence[ForkedProgram]]
) -> list[ScriptResult]:
    """Import modules, run the programs of a group at once, one group after another; return how each ended."""
    programs = [program for group in groups for program in group]
    given = json.dumps([[asdict(program) for program in group] for group in groups], default=str)
    result = run_script(SERVER, *modules, stdin=given, timeout=240)
    assert result.returncode == 0, result
    ended = zip(programs, json.loads(result.stdout.splitlines()[-1]), strict=True)
    return [
        ScriptResult((str(program.path), *program.args), code, stdout, stderr, result.elapsed)
        for program, (code, stdout, stderr) in ended
    ]
