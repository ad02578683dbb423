"""SIGTERM in training: all ranks stop after the same step, with a checkpoint and exit code 143."""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from rankwise.processes.signals import DEBOUNCE_S
from tests.helpers.scripts import RunningScript, ScriptRunner
from tests.process import test_signals
from tests.process.helpers import TORCHRUN, with_tests
from tests.process.stopping import CODE, OPTIONS, WHO, check_end, send_to

SCRIPT = """
    import sys
    from tests.process import stopping

    if __name__ == "__main__":
        getattr(stopping, sys.argv[1])(*sys.argv[2:])
"""


def start(run_script: ScriptRunner, strategy: str, folder: Path, *more: str) -> RunningScript:
    """Begin to train on two ranks; return when both have made a few steps, or are in a long validation."""
    running = run_script.start(SCRIPT, "train", strategy, str(folder), *more, env=with_tests(), siblings=1)
    running.wait_for("validating" if "validate long" in more else "training", count=2, timeout=60)
    return running


def check(running: RunningScript, folder: Path) -> None:
    """The script ends with 143, with a checkpoint, and both ranks have the same weights at the same step."""
    result = running.finish(timeout=60, leftover_grace_s=20)  # a forkserver takes its time to unload torch
    assert result.returncode == CODE, result
    assert "Error" not in result.stderr, result
    check_end(folder)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "who", "options"),
    [
        ("ddp", "rank", "accumulate"),
        ("ddp_fork", "main", "validate long"),
        ("ddp_fork", "group", "workers"),
        pytest.param("ddp", "group", "workers", marks=pytest.mark.soak),
        pytest.param("ddp_spawn", "main", "accumulate", marks=pytest.mark.soak),
        pytest.param("ddp_forkserver", "rank", "validate", marks=pytest.mark.soak),
    ],
)
def test_sigterm(strategy: str, who: str, options: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """Whichever process gets it, all stop after one step, with a checkpoint and exit code 143."""
    running = start(run_script, strategy, tmp_path, options)
    send_to(running.pid, who, tmp_path)
    check(running, tmp_path)


LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]
RUNS = int(os.environ.get("RANKWISE_SOAK_RUNS", "50"))


@pytest.mark.parametrize(
    ("who", "rounds"), [("group", 2), *(pytest.param(who, RUNS * 4 // 5, marks=LONG) for who in WHO)]
)
def test_sigterm_again_and_again(who: str, rounds: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """SIGTERM at random moments, in jobs forked from a process that has imported everything."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    arguments = ("series", who, str(rounds), str(seed), str(tmp_path))
    result = run_script(SCRIPT, *arguments, env=with_tests(), timeout=60 + 60 * rounds).check_returncode()
    assert result.stdout.count("in order") == rounds, result


@pytest.mark.parametrize("who", [pytest.param(who, marks=LONG) for who in WHO])
def test_sigterm_with_every_strategy(who: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """The rest of the fifty rounds: strategies whose ranks import everything again."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    generator = random.Random(seed)
    strategies = itertools.cycle(("ddp", "ddp_spawn", "ddp_forkserver"))
    for repetition in range(RUNS - RUNS * 4 // 5):
        folder = tmp_path / str(repetition)
        folder.mkdir()
        running = start(run_script, next(strategies), folder, generator.choice(OPTIONS))
        time.sleep(generator.random() / 2)
        send_to(running.pid, who, folder)
        check(running, folder)


def test_should_stop_on_one_rank(run_script: ScriptRunner, tmp_path: Path) -> None:
    """What one rank wants, all do: they end after the same step, and `fit` returns as always.

    The same script then finds a SIGTERM that is no echo of the first, in a step that does not end, to end
    the job at once.
    """
    arguments = ("train", "ddp_fork", str(tmp_path), "should_stop")
    running = run_script.start(SCRIPT, *arguments, env=with_tests())
    running.wait_for("fit has returned", timeout=60)
    ends = [json.loads((tmp_path / f"end{rank}").read_text()) for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0]["step"] in (7, 8)
    running.wait_for("hanging", count=2, timeout=60)
    for pause_s in (0.3, DEBOUNCE_S + 1):  # the second is an echo
        running.send_signal(signal.SIGTERM)
        time.sleep(pause_s)
    assert running.processes()
    running.send_signal(signal.SIGTERM)
    running.finish(timeout=30).check_returncode(CODE)
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.soak
@pytest.mark.parametrize("who", ["agent", "everybody"])
def test_sigterm_under_torchrun(who: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """The agent forwards the signal; ranks that get it twice save one checkpoint."""
    command = [sys.executable, *TORCHRUN, str(run_script.write(SCRIPT))]
    running = run_script.start_command([*command, "train", "ddp", str(tmp_path), "workers"], env=with_tests())
    running.wait_for("training", count=2, timeout=60)
    for process in running.processes() if who == "everybody" else running.processes()[:1]:
        process.send_signal(signal.SIGTERM)
    result = running.finish(timeout=30)
    assert result.returncode == 1, result  # torchrun's own, whatever the ranks end with
    assert "SignalException" in result.stderr
    check_end(tmp_path)


@pytest.mark.soak
def test_sigterm_to_an_elastic_agent(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Two signals, as from GNU timeout: the ranks have the time to save."""
    running = start(run_script, "ddp_elastic", tmp_path, "slow saving")
    for _ in range(2):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    check(running, tmp_path)


@pytest.mark.parametrize(
    ("start_method", "number"),
    [
        ("fork", signal.SIGHUP),
        ("popen", signal.SIGTERM),
        pytest.param("popen", signal.SIGHUP, marks=pytest.mark.soak),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_outside_a_loop(start_method: str, number: signal.Signals, run_script: ScriptRunner) -> None:
    """SIGTERM and SIGHUP end a job without a fit loop at once, through the `finally` blocks of its ranks."""
    running = test_signals.start(run_script, start_method, "collective of 1")
    sent = time.monotonic()
    running.send_signal(number)
    result = running.finish(timeout=30)
    assert time.monotonic() - sent < 30  # nobody was waited for until the grace was over
    assert result.returncode == 128 + number, result
    assert result.stdout.count("cleaned") == 2, result


HANGING = """
    import sys
    import torch
    from rankwise import DDPStrategy
    from rankwise.processes.fork_safety import import_dynamo
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    def never(state, bucket):
        print("hanging", flush=True)
        return torch.futures.Future()

    if __name__ == "__main__":
        import_dynamo()  # it takes longer than the timeout on a busy machine
        strategy = DDPStrategy(start_method=sys.argv[1], devices=2, timeout=4, comm_hook=never)
        quiet_trainer(strategy, 2, max_steps=3).fit(Regression(), loader(64, 4))
"""


@pytest.mark.parametrize("start_method", ["fork", pytest.param("popen", marks=pytest.mark.soak)])
def test_sigterm_where_no_step_ends(start_method: str, run_script: ScriptRunner) -> None:
    """One SIGTERM ends ranks that wait in native code for ever, also a rank 0 in the main process."""
    running = run_script.start(HANGING, start_method, env=with_tests(), siblings=1)
    running.wait_for("hanging", count=2, timeout=60)
    running.send_signal(signal.SIGTERM)
    running.finish(timeout=40).check_returncode(CODE)
