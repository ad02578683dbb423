"""The report's section on who started this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.doctor.report import Finding, Section
from rankwise.environments import Detection, detect_environment
from rankwise.errors import RankwiseError

# By the variable of a scheduler's allocation: the scheduler, and the command that starts ranks in it.
_SCHEDULERS = {"SLURM_JOB_ID": ("Slurm", "srun"), "LSB_JOBID": ("LSF", "jsrun")}
_PRESETS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_TITLE = "Who started this process"


def examine_environment(environ: Mapping[str, str]) -> tuple[Section, Detection | None]:
    """Report what was detected and why the others were not; the `Detection` is None if that failed."""
    try:
        detection = detect_environment(environ)
    except RankwiseError as error:
        return _undetected(error), None
    environment = detection.environment
    seen = environment.seen()
    lines = [f"{environment.name}: {detection.reason}"]
    lines += [f"  {name}={value}" for name, value in seen.items()]
    lines += [f"not {name}: {reason}" for name, reason in detection.rejected.items()]
    facts = {
        "name": environment.name,
        "reason": detection.reason,
        "variables": seen,
        "rejected": dict(detection.rejected),
    }
    findings = [] if environment.creates_processes_externally else _notes_when_alone(environ)
    return Section("environment", _TITLE, facts, lines, findings), detection


def _undetected(error: RankwiseError) -> Section:
    facts: dict[str, Any] = {"name": None, "reason": error.summary(), "variables": {}, "rejected": {}}
    lines = ["not known: a launcher's variables are set, but wrong"]
    if seen := error.seen():
        lines.append(f"  {seen}")
    return Section("environment", _TITLE, facts, lines, [Finding(error.summary(), error.fix())])


def _notes_when_alone(environ: Mapping[str, str]) -> list[Finding]:
    notes = []
    for variable, (scheduler, starter) in _SCHEDULERS.items():
        if job := environ.get(variable):
            what = (
                f"This is {scheduler} job {job}, but {starter} did not start this process: it is alone and "
                "uses this node only."
            )
            fix = (
                f"to train on all tasks of the job, put {starter} before the command: {starter} python "
                "train.py. To train on this node only, nothing."
            )
            notes.append(Finding(what, fix, is_error=False))
    if presets := [f"{name}={environ[name]}" for name in _PRESETS if environ.get(name)]:
        what = f"{', '.join(presets)} is set without the other variables of a launcher, so it was ignored."
        fix = (
            "nothing, if this machine or image presets it; if you start the ranks by hand, set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each."
        )
        notes.append(Finding(what, fix, is_error=False))
    return notes
