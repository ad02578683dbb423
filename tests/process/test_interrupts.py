"""Ctrl-C in training: what was trained is kept, by the caller and in a checkpoint; the second one ends it."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from rankwise.processes.signals import INTERRUPT_NOTICE
from tests.helpers.load import slowdown
from tests.helpers.parameters import first
from tests.helpers.scripts import RunningScript, ScriptResult, ScriptRunner
from tests.process.helpers import TORCHRUN, with_tests
from tests.process.stopping import CODE, check_end
from tests.process.test_stopping import HANGING

SOAK = pytest.mark.soak
INTERRUPTED = -signal.SIGINT  # what subprocess says of a process that a shell reports as 130
ENDS = {"fork": INTERRUPTED, "popen": 130}  # rank 0 in the main process waits in native code: that exits

SCRIPT = """
    import sys
    from tests.process.stopping import keep_after_signal

    if __name__ == "__main__":
        keep_after_signal(*sys.argv[1:])
"""


def start(run_script: ScriptRunner, strategy: str, folder: Path, *more: str) -> RunningScript:
    running = run_script.start(SCRIPT, strategy, str(folder), *more, env=with_tests(), siblings=1)
    running.wait_for("training", count=2, timeout=60)
    return running


def interrupt(running: RunningScript, who: str) -> ScriptResult:
    """Send Ctrl-C to the main process or to the whole group; return how the script ended."""
    send = running.send_signal_to_group if who == "group" else running.send_signal
    send(signal.SIGINT)
    result = running.finish(timeout=60, leftover_grace_s=20)
    assert result.returncode == INTERRUPTED, result
    assert result.stderr.count(INTERRUPT_NOTICE) == 1, result
    return result


def check_kept(result: ScriptResult, folder: Path, *, sigterm: bool) -> None:
    """Both ranks and the checkpoint have the same weights, and so has the caller, which can train on."""
    check_end(folder)
    end = json.loads((folder / "end0").read_text())
    kept = next(line for line in result.stdout.splitlines() if line.startswith("kept "))
    assert json.loads(kept.removeprefix("kept ")) == [end["step"], end["bias"], True, sigterm, end["step"]]
    if result.command[2] != "ddp":
        assert "continued to 2" in result.stdout, result


@pytest.mark.parametrize(
    ("strategy", "who", "workers"),
    first(
        3,
        [
            *(("ddp", "group", ""), ("ddp_fork", "main", ""), ("ddp_elastic", "group", "")),
            *(("ddp", "group", "spawn"), ("ddp_fork", "group", "spawn"), ("ddp", "main", "fork")),
            *(("ddp_spawn", "group", "fork"), ("ddp_forkserver", "main", ""), ("ddp_notebook", "group", "")),
            ("ddp_elastic", "main", ""),
        ],
    ),
)
def test_ctrl_c(strategy: str, who: str, workers: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """All ranks stop after one step, with a checkpoint; the caller has the state, and what Ctrl-C raises.

    The caller of elastic ranks does not have the state.
    """
    result = interrupt(start(run_script, strategy, tmp_path, workers), who)
    if strategy == "ddp_elastic":
        check_end(tmp_path)
    else:
        assert result.stderr.count("Traceback (most recent call last)") == 1, result
        check_kept(result, tmp_path, sigterm=False)


@SOAK
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_sigterm(strategy: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """The caller has the state, too, and knows of the signal."""
    running = start(run_script, strategy, tmp_path)
    running.send_signal(signal.SIGTERM)
    result = running.finish(timeout=60)
    assert result.returncode == CODE, result
    check_kept(result, tmp_path, sigterm=True)


@SOAK
def test_ctrl_c_under_torchrun(run_script: ScriptRunner, tmp_path: Path) -> None:
    """A terminal sends it to the agent and to the ranks, to which the agent forwards it."""
    command = [sys.executable, *TORCHRUN, str(run_script.write(SCRIPT)), "ddp", str(tmp_path)]
    running = run_script.start_command(command, env=with_tests())
    running.wait_for("training", count=2, timeout=60)
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=60)
    assert result.returncode != 0, result
    assert result.stdout.count("kept [") == 2, result
    check_end(tmp_path)


@pytest.mark.parametrize(
    ("start_method", "timeout_s"),
    [
        ("fork", 3600),
        *(pytest.param(*each, marks=SOAK) for each in (("popen", 3600), ("fork", 4), ("popen", 4))),
    ],
)
def test_ctrl_c_where_no_step_ends(start_method: str, timeout_s: int, run_script: ScriptRunner) -> None:
    """A second one ends ranks that wait in native code for ever, within the grace period.

    One is enough in the end: after the time that a collective may take.
    """
    source = HANGING.replace("timeout=4", f"timeout={timeout_s}")
    running = run_script.start(source, start_method, env=with_tests(), siblings=1)
    running.wait_for("hanging", count=2, timeout=60)
    if timeout_s == 4:
        running.send_signal(signal.SIGINT)
    else:
        running.send_signal_to_group(signal.SIGINT)
        deadline = time.monotonic() + 60 * slowdown()
        while INTERRUPT_NOTICE not in running.stderr and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=60)
    assert timeout_s == 4 or result.stderr.count(INTERRUPT_NOTICE) == 1, result
    assert result.returncode == ENDS[start_method], result
