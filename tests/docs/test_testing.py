"""The examples of docs/testing.md run as written."""

import re
from pathlib import Path

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import PYTEST, with_tests

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
NAMES = """
import pytest, time, torch
from rankwise import Trainer
from rankwise.checkpoint import TorchCheckpointIO as MyCheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.strategies import DDPForkStrategy as MyStrategy
from tests.process.training_tasks import Regression, loader as samples

class MyEnvironment(ClusterEnvironment):
    name = "mine"
    variables = {
        "global_rank": "MY_RANK",
        "world_size": "MY_SIZE",
        "local_rank": "MY_LOCAL_RANK",
        "local_world_size": "MY_LOCAL_SIZE",
    }

module, loader = Regression(), samples(16, 2)
trainer = Trainer(strategy="ddp_fork", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)

"""


def test_the_examples(run_script: ScriptRunner) -> None:
    """Each program of the page passes, with the reader's own names filled in."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    faults = next(block for block in blocks if "inject_faults" in block)
    inside = "def test_faults():\n" + re.sub(r"^(?=.)", "    ", faults, flags=re.MULTILINE)
    source = NAMES + "\n\n".join(block for block in blocks if block is not faults) + "\n\n" + inside
    path = run_script.write(source, "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests())
    assert "6 passed" in result.stdout, result
