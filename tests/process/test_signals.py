"""Ctrl-C raises `KeyboardInterrupt` in the caller, every worker ends, the shell sees 130."""

import multiprocessing
import signal
import sys
import time

import psutil
import pytest

from tests.helpers.parameters import first
from tests.helpers.scripts import RunningScript, ScriptRunner
from tests.process.helpers import ddp

JOB = """
    import functools, signal, sys, time
    from rankwise.strategies import DDPStrategy
    import torch, torch.distributed as dist

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup leaves it ignored
    say = functools.partial(print, flush=True)

    def job(strategy, what):
        strategy.barrier()
        try:
            say("busy")
            if what == f"collective of {strategy.global_rank}":
                dist.all_reduce(torch.ones(2))
            while what == "loop":
                sum(range(1000))
            time.sleep(60)
        finally:
            say("cleaning", strategy.global_rank)
            time.sleep(0.2)
            say("cleaned", strategy.global_rank)

    if __name__ == "__main__":
        start_method, what = sys.argv[1:]
        # Under "popen" a launch after a failed one has to be told what to run: all of them do the same here.
        command = [sys.executable, *sys.argv] if start_method == "popen" else None
        options = {"accelerator": "cpu", "devices": 2, "grace_period_s": 40, "command": command}
        for is_last in (False, True):
            try:
                DDPStrategy(start_method=start_method, **options).launch(job, what)
            except KeyboardInterrupt as error:
                say("caught", repr(error))
                if is_last:
                    raise
"""


def start(run_script: ScriptRunner, start_method: str, what: str = "sleep") -> RunningScript:
    """Start the job and wait until both ranks are busy."""
    running = run_script.start(JOB, start_method, what, siblings=int(start_method == "popen"))
    running.wait_for("busy", count=2)
    time.sleep(0.2)
    return running


@pytest.mark.parametrize("start_method", first(1, ["fork", "popen", "spawn", "forkserver"]))
@pytest.mark.parametrize("what", ["collective of 0", pytest.param("loop", marks=pytest.mark.soak)])
def test_ctrl_c(start_method: str, what: str, run_script: ScriptRunner) -> None:
    """First SIGINT to the main process alone, which its caller catches; in the next job to the whole group.

    Both times every rank leaves by its `finally`, in a collective or not. The script that does not catch it
    ends as one that was interrupted, with one traceback.
    """
    running = start(run_script, start_method, what)
    sent = time.monotonic()
    running.send_signal(signal.SIGINT)
    running.wait_for("caught KeyboardInterrupt()", timeout=30)
    assert time.monotonic() - sent < 30  # nobody was waited for until the grace was over
    cleaned = sorted(line for line in running.stdout.splitlines() if line.startswith("cleaned"))
    # A rank that waits in a collective is woken by the end of its peer.
    assert cleaned == ["cleaned 0", "cleaned 1"]

    running.wait_for("busy", count=4)
    time.sleep(0.2)
    sent = time.monotonic()
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=30)
    assert time.monotonic() - sent < 30
    assert result.returncode == -signal.SIGINT, result  # a shell reports it as 130
    assert result.stdout.count("caught KeyboardInterrupt()") == 2
    assert result.stderr.count("Traceback (most recent call last)") == 1, result


def test_sigint_to_workers_alone_changes_nothing(run_script: ScriptRunner) -> None:
    """Workers ignore SIGINT, which the main process handles. SIGTERM to the main process ends all."""
    running = start(run_script, "fork")
    workers = [process for process in running.processes() if process.pid != running.pid]
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    running.send_signal(signal.SIGTERM)
    assert running.finish(timeout=30).returncode == 128 + signal.SIGTERM


OWN_HANDLER = """
    import signal, time
    from pathlib import Path
    from rankwise.strategies import DDPStrategy

    def on_sigint(number, interrupted):
        Path("heard").touch()

    def job(strategy):
        strategy.barrier()
        print("busy", flush=True)
        while not Path("heard").exists():
            time.sleep(0.02)
        return "value"

    signal.signal(signal.SIGINT, on_sigint)
    print(DDPStrategy(start_method="fork", accelerator="cpu", devices=2).launch(job), flush=True)
    assert signal.getsignal(signal.SIGINT) is on_sigint
"""


def test_a_handler_of_ones_own_decides(run_script: ScriptRunner) -> None:
    """The caller's own handler of SIGINT is called, and the job continues."""
    running = run_script.start(OWN_HANDLER)
    running.wait_for("busy", count=2)
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=30).check_returncode()
    assert "value" in result.stdout


BEGINNING = """
    import signal, sys
    from functools import partial
    from rankwise.strategies import DDPStrategy

    def say(when, strategy=None):
        print(when, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)

    if __name__ == "__mp_main__":
        say("blocked")

    if __name__ == "__main__":
        DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(partial(say, "then"))
"""


@pytest.mark.soak
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_ctrl_c_does_not_disturb_ranks_that_import(start_method: str, run_script: ScriptRunner) -> None:
    """A rank blocks SIGINT from its start until it has a handler."""
    result = run_script(BEGINNING, start_method)
    assert sorted(result.stdout.splitlines()) == ["blocked True"] * 2 + ["then False"] * 2, result


def exit_with_1_if_interrupts_are_blocked() -> None:
    sys.exit(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_the_users_own_processes_hear_ctrl_c() -> None:
    """Other processes of the forkserver that a launch has started can be interrupted."""
    ddp("forkserver").launch(print)
    process = multiprocessing.get_context("forkserver").Process(target=exit_with_1_if_interrupts_are_blocked)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
