"""Ctrl-C: `KeyboardInterrupt` reaches the caller, every worker leaves, the shell sees 130."""

from __future__ import annotations

import signal
import sys
import time

import psutil
import pytest

from tests.helpers.scripts import RunningScript, ScriptRunner

pytestmark = pytest.mark.timeout(60)

METHODS = ("popen", "spawn", "fork", "forkserver")
INTERRUPTED = -signal.SIGINT  # what subprocess says of a process that a shell reports as 130

JOB = """
    import os, sys, time
    import rankwise
    from rankwise.strategies import DDPStrategy
    import torch, torch.distributed as dist

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    def job(strategy, what, cleaning):
        strategy.barrier()
        try:
            say("busy")
            if what == "collective":
                if strategy.global_rank == 0:
                    dist.all_reduce(torch.ones(2))
                time.sleep(60)
            elif what == "loop":
                while True:
                    sum(range(1000))
            time.sleep(60)
        finally:
            say("cleaning", strategy.global_rank)
            time.sleep(cleaning)
            say("cleaned", strategy.global_rank)

    if __name__ == "__main__":
        start_method, what, catches, cleaning, grace = sys.argv[1:]
        strategy = DDPStrategy(
            start_method=start_method, accelerator="cpu", devices=2, grace_period_s=float(grace)
        )
        try:
            strategy.launch(job, what, float(cleaning))
        except KeyboardInterrupt as error:
            say("caught", repr(error))
            if catches == "no":
                raise
        say("went on")
"""


def start(
    run_script: ScriptRunner,
    start_method: str,
    what: str = "sleep",
    *,
    catches: bool = False,
    cleaning: float = 0.0,
    grace: float = 1.0,
) -> RunningScript:
    """Start the job and wait until both ranks are busy."""
    words = (start_method, what, "yes" if catches else "no", str(cleaning), str(grace))
    running = run_script.start(JOB, *words)
    running.wait_for("busy", count=2)
    time.sleep(0.2)
    return running


@pytest.mark.parametrize("start_method", METHODS)
def test_ctrl_c_ends_the_script_with_130(start_method: str, run_script: ScriptRunner) -> None:
    """SIGINT to the whole group, as a terminal sends it: all leave, the caller gets it, one traceback."""
    running = start(run_script, start_method)
    sent = time.monotonic()
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=10)
    assert time.monotonic() - sent < 3
    assert result.returncode == INTERRUPTED, result
    assert "caught KeyboardInterrupt()" in result.stdout
    assert "went on" not in result.stdout
    assert result.stderr.count("Traceback (most recent call last)") == 1, result


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("what", ["collective", pytest.param("loop", marks=pytest.mark.soak)])
def test_sigint_to_the_main_process_alone(start_method: str, what: str, run_script: ScriptRunner) -> None:
    """Workers that got no signal themselves are ended too, in a collective or not; a script may go on."""
    running = start(run_script, start_method, what, catches=True)
    sent = time.monotonic()
    running.send_signal(signal.SIGINT)
    result = running.finish(timeout=10)
    assert time.monotonic() - sent < 4
    assert (result.returncode, result.stderr) == (0, ""), result
    assert result.stdout.rstrip().endswith("caught KeyboardInterrupt()\nwent on")


@pytest.mark.parametrize("start_method", ["fork", "popen"])
def test_finally_blocks_run(start_method: str, run_script: ScriptRunner) -> None:
    """Every rank's `finally` has the grace to run in, also when the signal reached all."""
    running = start(run_script, start_method, cleaning=0.3)
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=10)
    assert result.returncode == INTERRUPTED
    assert sorted(line for line in result.stdout.splitlines() if "cleaned" in line) == [
        "cleaned 0",
        "cleaned 1",
    ]


def test_a_second_ctrl_c_skips_the_grace(run_script: ScriptRunner) -> None:
    """Who presses twice does not wait for a rank's clean-up."""
    running = start(run_script, "fork", cleaning=20, grace=20)
    running.send_signal_to_group(signal.SIGINT)
    running.wait_for("cleaning", count=2, timeout=5)
    sent = time.monotonic()
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=10)
    assert time.monotonic() - sent < 2
    assert result.returncode == INTERRUPTED
    assert "cleaned" not in result.stdout


def test_a_shell_sees_130(run_script: ScriptRunner) -> None:
    """The exit code, as a shell gives it, is 130."""
    path = run_script.write(JOB)
    shell = f'"{sys.executable}" {path} fork sleep no 0 1; echo "code $?"'
    running = run_script.start_command(["bash", "-c", f"trap : INT; {shell}"])
    running.wait_for("busy", count=2)
    time.sleep(0.2)
    running.send_signal_to_group(signal.SIGINT)
    assert "code 130" in running.finish(timeout=10).stdout


def test_sigint_to_a_worker_alone_changes_nothing(run_script: ScriptRunner) -> None:
    """Ctrl-C is the main process's to answer: a worker that gets it goes on."""
    running = start(run_script, "fork", catches=True)
    workers = [process for process in running.processes() if process.pid != running.pid]
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    running.send_signal(signal.SIGINT)
    assert running.finish(timeout=10).returncode == 0


OWN_HANDLER = """
    import os, signal, threading, time
    from rankwise.strategies import DDPStrategy

    def on_sigint(number, interrupted):
        print("own handler", flush=True)

    def job(strategy):
        strategy.barrier()
        print("busy", flush=True)
        time.sleep(1)
        return "value"

    signal.signal(signal.SIGINT, on_sigint)
    print(DDPStrategy(start_method="fork", accelerator="cpu", devices=2).launch(job), flush=True)
    assert signal.getsignal(signal.SIGINT) is on_sigint
"""


def test_a_handler_of_ones_own_decides(run_script: ScriptRunner) -> None:
    """Where the caller handles SIGINT itself, it is called, and the job goes on."""
    running = run_script.start(OWN_HANDLER)
    running.wait_for("busy", count=2)
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=10)
    assert result.returncode == 0, result
    assert "own handler\n" in result.stdout
    assert "value" in result.stdout


@pytest.mark.parametrize("start_method", ["fork", "popen"])
def test_sigterm_ends_all(start_method: str, run_script: ScriptRunner) -> None:
    """SIGTERM to the main process, which ends it at once, takes the workers with it."""
    running = start(run_script, start_method)
    running.send_signal(signal.SIGTERM)
    assert running.finish(timeout=10).returncode == -signal.SIGTERM
