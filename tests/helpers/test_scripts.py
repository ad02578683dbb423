"""The script runner: what a program did comes back, and what it leaves behind fails the test."""

from __future__ import annotations

import contextlib
import signal
import sys
import time

import psutil
import pytest

from tests.helpers.scripts import ScriptRunner

LEAVE_A_SLEEPER = (
    "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session={session}).pid)"
)


def test_a_result_comes_back(run_script: ScriptRunner) -> None:
    """Exit code, output, arguments, variables and the working directory are the program's own."""
    source = """
        import os, sys
        print(sys.argv[1:], os.environ["RW_GIVEN"], os.environ.get("HOME"), os.getcwd(), sys.flags.utf8_mode)
        print("to stderr", file=sys.stderr)
        sys.exit(3)
    """
    env = {"RW_GIVEN": "value", "HOME": None}
    result = run_script(source, "--flag", "a b", env=env, python_args=("-X", "utf8"))
    assert result.returncode == 3
    assert result.stdout == f"['--flag', 'a b'] value None {run_script.folder} 1\n"
    assert result.stderr == "to stderr\n"
    assert 0 < result.elapsed < 30


def test_a_command_reads_stdin(run_script: ScriptRunner) -> None:
    """Any command can be run, and given something to read."""
    result = run_script.command([sys.executable, "-"], stdin="print(6 * 7)")
    assert (result.returncode, result.stdout) == (0, "42\n")


@pytest.mark.parametrize("session", [False, True])
def test_an_orphan_fails_the_test(run_script: ScriptRunner, *, session: bool) -> None:
    """A process that outlives the program is named and killed, in the program's session or its own."""
    running = run_script.start(LEAVE_A_SLEEPER.format(session=session))
    with pytest.raises(AssertionError, match=r"left 1 processes behind:\n.*sleep 60") as caught:
        running.finish(leftover_grace_s=0.1)
    orphan = int(str(caught.value).partition("--- stdout ---")[2].split()[0])
    with contextlib.suppress(psutil.NoSuchProcess):  # who adopted it has waited for it
        assert psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_hangs_fails_the_test(run_script: ScriptRunner) -> None:
    """A program over its time is killed, with what it printed in the message."""
    running = run_script.start("import time; print('I sleep', flush=True); time.sleep(60)")
    running.wait_for("I sleep")
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)ran longer than 0\.5 s.*I sleep"):
        running.finish(timeout=0.5)
    assert time.monotonic() - start < 30


def test_two_programs_of_one_test_are_told_apart(run_script: ScriptRunner) -> None:
    """The end of one program does not wait for another that still runs."""
    first = run_script.start(
        run_script.write("import time; print('up', flush=True); time.sleep(60)", "first.py")
    )
    first.wait_for("up")
    assert run_script("print('second')").returncode == 0
    first.send_signal(signal.SIGINT)
    result = first.finish(timeout=60)
    assert result.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr


def test_waiting_for_what_never_comes_fails(run_script: ScriptRunner) -> None:
    """A program that ends without printing the text is no reason to wait on."""
    running = run_script.start("print('one')")
    with pytest.raises(AssertionError, match="ended without printing 'two'"):
        running.wait_for("two")
