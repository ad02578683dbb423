"""A group whose last reference is in a callback that one of its own threads drops."""

from __future__ import annotations

from tests.helpers.scripts import ScriptRunner

PROGRAM = """
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from rankwise.process_group.group import process_group
from rankwise.ranks import RankInfo


class Hook:
    '''What refers to its group, as a hook's state does, and takes a while to go.'''

    def __init__(self):
        self.group = dist.group.WORLD

    def __call__(self, done):
        return done.value()[0]

    def __del__(self):
        time.sleep(0.3)
        print("the callback is gone", flush=True)


with process_group(
    dist.HashStore(), RankInfo(0, 0, 0, 1, 1, 1), "gloo", torch.device("cpu"), timeout=timedelta(seconds=60)
):
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(Hook()).wait()
time.sleep(0.6)
print("this process is not")
"""


def test_the_thread_does_not_wait_for_itself(run_script: ScriptRunner) -> None:
    """The callback goes after the group was destroyed: the process lives on."""
    result = run_script(PROGRAM)
    assert result.returncode == 0, result
    assert result.stdout.split("\n")[:2] == ["the callback is gone", "this process is not"]
