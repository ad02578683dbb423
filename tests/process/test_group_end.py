"""The threads of a process group end with the job, whoever has the last reference to the group."""

import pytest
import torch

from tests.helpers.scripts import ScriptRunner

PROGRAM = """
import threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from rankwise.process_group.group import process_group
from rankwise.ranks import RankInfo

is_destroyed, is_gone = threading.Event(), threading.Event()
too_early = []  # those whose reduction was done before they were passed on: the main thread has called them

class Hook:
    '''What refers to its group, as a hook's state does, and goes after everybody else.'''

    def __init__(self):
        self.group = dist.group.WORLD

    def __call__(self, done):
        return done.value()[0]

    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            too_early.append(True)
            return
        is_destroyed.wait(60)
        print("the callback is gone", flush=True)
        is_gone.set()

place = RankInfo(0, 0, 0, 1, 1, 1)
with process_group(dist.HashStore(), place, "gloo", torch.device("cpu"), timeout=timedelta(seconds=60)):
    tries = 0
    while len(too_early) == tries:
        tries += 1
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(Hook()).wait()
is_destroyed.set()
is_gone.wait(60)
time.sleep(0.5)  # what it referred to goes
print("this process is not")
"""


def test_the_thread_does_not_wait_for_itself(run_script: ScriptRunner) -> None:
    """A callback is dropped after the group was destroyed, and the process does not abort."""
    result = run_script(PROGRAM)
    assert result.returncode == 0, result
    assert result.stdout.split("\n")[:2] == ["the callback is gone", "this process is not"]


WRAPPED = """
from pathlib import Path
import torch
import rankwise

def job(strategy):
    strategy.setup_module(torch.nn.Linear(2, 2))
    return threads_of_gloo()

def threads_of_gloo():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

during = rankwise.DDPStrategy(start_method="popen", accelerator="cpu", devices=1).launch(job)
print(during > 0, threads_of_gloo())
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have no names in older versions")
def test_the_threads_end_with_the_job(run_script: ScriptRunner) -> None:
    """A thread that is there when the interpreter ends may abort the process."""
    result = run_script(WRAPPED)
    assert (result.returncode, result.stdout) == (0, "True 0\n"), result
