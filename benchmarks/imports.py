"""What importing a library costs beyond `import torch`: processor time, and the number of modules."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from benchmarks.paired import interleaved
from benchmarks.programs import variables
from benchmarks.results import Result, is_installed, rows_of
from benchmarks.sampling import Sampling

_PROGRAM = """
import json, sys, time
import torch
modules, own, begun = len(sys.modules), time.process_time(), 0.0
{statement}
print(json.dumps([own - begun, time.process_time() - own, len(sys.modules) - modules]))
"""

_TORCH = "import torch"
STATEMENTS = {
    _TORCH: "torch",
    "import rankwise": "rankwise",
    "from rankwise import Trainer, DDPStrategy": "rankwise",
    "import lightning.pytorch": "lightning",
    "import lightning.fabric": "lightning",
    "import accelerate": "accelerate",
    "import ignite.engine": "ignite",
    "import torchrunx": "torchrunx",
}
"""Statements, and the package that each needs; the first is what the others are measured beyond."""


def measure(sampling: Sampling) -> Result:
    """Measure all statements, each in fresh processes."""
    here = [statement for statement, package in STATEMENTS.items() if is_installed(package)]
    for statement in here if not sampling.is_quick else ():
        cost_of(statement)  # warms the disk cache, and writes the .pyc files
    arms = {each: partial(cost_of, each) for each in here}
    fewer = sampling.rounds_of(here, always=3)
    found = interleaved(arms, sampling.programs, warms_up=False, rounds_of=fewer)
    whole = {name: [own + torch for torch, own, _ in costs] for name, costs in found.items()}
    beyond = {name: [own * 1e3 for _, own, _ in costs] for name, costs in found.items() if name != _TORCH}
    modules = {name: [float(count) for *_, count in found[name]] for name in beyond}
    absent = [statement for statement in STATEMENTS if statement not in here]
    rows = [
        *rows_of("processor time with import torch", "s", whole),
        *rows_of("processor time beyond import torch", "ms", beyond, has_ratios=False),
        *rows_of("modules beyond those of torch", "", modules, has_ratios=False),
    ]
    return Result("import", rows, absent)


def cost_of(statement: str) -> tuple[float, float, int]:
    """Return processor time of torch and of the statement after it in seconds, and its number of modules."""
    program = _PROGRAM.format(statement=statement)
    output = subprocess.check_output([sys.executable, "-c", program], env=variables(), text=True)
    torch_s, own_s, modules = json.loads(output.splitlines()[-1])
    return torch_s, own_s, modules
