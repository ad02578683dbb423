"""`examples/digits.py` and the doctor on a cluster: how they are started, and what they must have printed."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
DIGITS = EXAMPLES / "digits.py"
EPOCHS = 2
BRIEF = ("--max-epochs", str(EPOCHS))
SAMPLES = 1440
LIMIT_S = 200  # of one command, on a machine that is busy with other things; alone it takes seconds
_BIN = Path(sys.executable).parent

VARIABLES = {"PATH": os.pathsep.join([str(_BIN), os.environ.get("PATH", os.defpath)])}
"""`env=` with which the job scripts find this Python, as an activated virtual environment does."""


def check_digits(
    stdout: str, node_ranks: Sequence[int], hosts: Sequence[str] | None = None, epochs: int = EPOCHS
) -> None:
    """Check who has trained, and that each sample was seen once per epoch.

    Args:
        stdout: what all ranks of one job have printed.
        node_ranks: the node of each rank, in rank order.
        hosts: the host's name of each node; None where all are this machine.
        epochs: for how many the script has trained.
    """
    world_size = len(node_ranks)
    pattern = rf"global_rank (\d+) of {world_size}, node_rank (\d+), (\S+): (\d+) samples per epoch"
    found = re.findall(pattern, stdout)
    assert [int(rank) for rank, *_ in found] == list(range(world_size)), stdout
    assert [int(node_rank) for _, node_rank, *_ in found] == list(node_ranks), stdout
    if hosts is not None:
        assert [host for *_, host, _ in found] == [hosts[node] for node in node_ranks], stdout
    assert {int(count) for *_, count in found} == {SAMPLES // world_size}, stdout
    assert stdout.count(f"{epochs} epochs: each sample was seen {epochs} to {epochs} times") == 1, stdout
    assert stdout.count(f"world size {world_size}, test accuracy") == 1, stdout


def check_doctor(stdout: str, environment: str, world_size: int) -> None:
    """Check that the doctor has printed one healthy report, on these ranks."""
    assert stdout.count("Who started this process") == 1, stdout
    assert f"\n  {environment}: " in stdout, stdout
    assert f"\n  {world_size} ranks, " in stdout, stdout
    assert "WRONG" not in stdout, stdout
    assert re.search(r"tensor +time +bandwidth per link\n +4 B +[\d.]+ ms", stdout), stdout
    assert "\n  Next:  " in stdout, stdout
