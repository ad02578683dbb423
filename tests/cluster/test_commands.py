"""Ranks on two hosts, which one process starts by a remote shell."""

import signal
import sys

import pytest

from tests.cluster.hosts import TwoHosts
from tests.helpers.scripts import RunningScript, ScriptRunner
from tests.process.helpers import with_tests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROGRAM = """
import os, shlex, subprocess, sys, time
from pathlib import Path
import torch
from rankwise import CommandLauncher, DDPStrategy

SHELL, RENDEZVOUS, WHAT = sys.argv[1:]

def start(command, environment, global_rank):
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    popen = subprocess.Popen(
        [SHELL, "hosta" if global_rank < 2 else "hostb", "sh", "-s"],
        stdin=subprocess.PIPE, text=True, start_new_session=True,
    )
    popen.stdin.write("\\n".join([*exports, "exec " + shlex.join(command)]))
    popen.stdin.close()
    return popen

def is_on_a_command_line(key):
    return any(key in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))

def work(strategy):
    total = strategy.all_reduce(torch.ones(2) * strategy.global_rank, reduce_op="sum").tolist()
    key = strategy.worker.key
    strategy.barrier()
    if WHAT == "raise" and strategy.global_rank == 3:
        raise ValueError("boom on purpose")
    if WHAT == "sleep":
        print(f"rank {strategy.global_rank} sleeps", flush=True)
        time.sleep(100)
    host = os.uname().nodename
    return strategy.ranks, host, os.environ["GLOO_SOCKET_IFNAME"], total, len(key), is_on_a_command_line(key)

if __name__ == "__main__":
    launcher = CommandLauncher(start, address="10.77.0.1")
    strategy = DDPStrategy(
        launcher=launcher, accelerator="cpu", devices=2, num_nodes=2, rendezvous=RENDEZVOUS, timeout=30
    )
    strategy.launch(work)
    for value in strategy.results.values():
        print(value)
"""


def start(hosts: TwoHosts, runner: ScriptRunner, *arguments: str) -> RunningScript:
    """Start the program on the first host."""
    shell = str(hosts.remote_shell(runner.folder))
    program = [sys.executable, str(runner.write(PROGRAM)), shell, *arguments]
    return runner.start_command(program, place=hosts.place("hosta"), env=with_tests())


@pytest.mark.parametrize("rendezvous", ["private", pytest.param("tcp", marks=pytest.mark.soak)])
def test_ranks_of_two_hosts(hosts: TwoHosts, run_script: ScriptRunner, rendezvous: str) -> None:
    """They meet through the launching process, and no command line has the job's key."""
    result = start(hosts, run_script, rendezvous, "end").finish()
    assert result.returncode == 0, result
    for rank in range(4):
        place = f"global_rank {rank} of 4, local_rank {rank % 2} of 2, node {rank // 2} of 2"
        host = hosts.names[rank // 2]
        assert f"{place}), '{host}', '{hosts.interface}', [6.0, 6.0], 64, False)" in result.stdout, result


@pytest.mark.soak
def test_a_failure_names_rank_and_host(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """The exception of a rank on the other host is the caller's."""
    result = start(hosts, run_script, "auto", "raise").finish()
    assert result.returncode == 1, result
    assert "Worker global_rank=3 (local_rank=1, node_rank=1, host 'hostb', pid" in result.stderr, result
    assert "raised ValueError: boom on purpose" in result.stderr, result


def test_the_end_of_the_caller(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """It ends the ranks on both hosts, although the remote shells survive it."""
    running = start(hosts, run_script, "auto", "sleep")
    running.wait_for("sleeps", count=4)
    running.send_signal(signal.SIGKILL)
    running.finish(timeout=60)


def test_a_cut_cable_is_a_failure(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """A host that cannot be reached any more is noticed, although its processes live."""
    running = start(hosts, run_script, "auto", "sleep")
    running.wait_for("sleeps", count=4)
    try:
        hosts.cut()
        running.popen.wait(120)
    finally:
        hosts.join()
    result = running.finish()
    assert result.returncode == 1, result
    assert "its connection is lost" in result.stderr, result
    assert "node_rank=1, host 'hostb', pid" in result.stderr, result
