"""Every example runs as its docstring says, on two processes, and prints the expected result."""

import re
from pathlib import Path

import pytest

from tests.cluster.digits import EXAMPLES, check_digits
from tests.helpers.parameters import first
from tests.helpers.scripts import ScriptRunner


@pytest.mark.soak  # README's command to train runs the same program
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_notebook"])
def test_digits(strategy: str, run_script: ScriptRunner) -> None:
    """The digits are learnt with each start method; accuracy is above 95 %."""
    options = ("--strategy", strategy, "--devices", "2")
    result = run_script(EXAMPLES / "digits.py", *options, timeout=100, siblings=int(strategy == "ddp"))
    assert result.returncode == 0, result
    check_digits(result.stdout, node_ranks=[0, 0], epochs=15)
    assert float(re.findall(r"accuracy ([\d.]+)%", result.stdout)[0]) > 95, result


LINE = "y = 3.00 x + 1.00"
PROMISES = {
    "plain_loop.py --strategy ddp_fork": "the same on every rank",
    "fsspec_checkpoints.py memory://line": (
        "continued from memory://line/last.ckpt, now: epoch=2.ckpt, last.ckpt"
    ),
    "model_averaging.py": LINE,
    "plain_loop.py": "the same on every rank",
    "gan.py": "mean images differ by 0.0",
    "custom_wrapper.py": "CountingWrapper was called 40 times",  # the README's is run
    "register_alias.py": LINE,
    "gradient_hooks.py": LINE,  # forked elsewhere
    "char_lm.py": "nats per character",
}


@pytest.mark.parametrize(("command", "promised"), first(2, PROMISES.items()))
def test_example(command: str, promised: str, run_script: ScriptRunner) -> None:
    """The example prints the expected text once."""
    name, *arguments = command.split()
    result = run_script(EXAMPLES / name, *arguments, timeout=100, siblings=1)
    assert result.returncode == 0, result
    assert result.stdout.count(promised) == 1, result


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    """An example has at most 85 lines."""
    assert len(path.read_text().splitlines()) <= 85
