"""The script runner: what a program did comes back, and what it leaves behind fails the test."""

import contextlib
import json
import signal
import sys
import time
from typing import Any

import psutil
import pytest

from tests.helpers import processes
from tests.helpers.leak_checks import SET_BY_IMPORTS
from tests.helpers.raising import raises
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests


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


STATE = """
    import gc, json, os, random, signal, sys, threading, warnings
    import torch, torch._dynamo
    from lightning_utilities.core.rank_zero import rank_zero_only

    has_rank = hasattr(rank_zero_only, "rank")
    os.environ["RANK"] = "3"
    import rankwise.fabric, rankwise.launchers.script
    from rankwise import Trainer, seed, start

    main = vars(sys.modules["__main__"])
    print(json.dumps({
        "command": [sys.argv, sys.orig_argv, sys.path, os.getcwd()],
        "variables": {name: value for name, value in os.environ.items() if name not in sys.argv},
        "main": {name: str(main[name]).partition(" at ")[0] for name in main if name.startswith("__")},
        "session": [os.getsid(0) - os.getpid(), os.getpgid(0) - os.getpid()],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "streams": [str(sys.stdin), str(sys.stdout), sys.stdout.line_buffering, sys.stdin.seekable()],
        "flags": [str(sys.flags), sys.warnoptions, sys._xoptions, sys.getrecursionlimit(), gc.isenabled()],
        "hooks": [sys.excepthook is sys.__excepthook__, threading.active_count()],
        "rankwise": sorted(name for name in sys.modules if name.startswith("rankwise")),
        "recorded": [has_rank, rank_zero_only.rank, start.WORKING_DIRECTORY],
        "random state": seed.AT_IMPORT["python"] == random.getstate(),
        "filters": list(map(str, warnings.filters)),
        "torch": [torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())],
    }))
    drawn = [random.random(), float(torch.rand(1)), __import__("numpy").random.rand()]
    print(json.dumps(drawn))
"""
NOT_COMPARED = (processes.MARKER, "TORCHINDUCTOR_CACHE_DIR")  # the latter is set by torch._dynamo's import


@pytest.mark.full
def test_a_fork_is_as_an_interpreter_of_its_own(run_script: ScriptRunner) -> None:
    """What a program finds does not tell whether it was forked; random numbers are each program's own."""
    results = [run_script(STATE, *NOT_COMPARED, fresh=fresh) for fresh in (True, False, False)]
    alone, forked, other = (list(map(json.loads, result.stdout.splitlines())) for result in results)
    assert alone[0] == forked[0] == other[0]
    assert not set(forked[1]) & set(other[1])


ENDS = {
    "raise KeyboardInterrupt": -signal.SIGINT,
    "def fail():\n    1 / 0\ntry:\n    fail()\nexcept ValueError:\n    pass": 1,
    "x = (": 1,
    "import sys\nsys.exit('text')": 1,
    "raise SystemExit(7)": 7,
    "import os\nos.kill(os.getpid(), 9)": -9,
    "import sys\nsys.excepthook = lambda *args: sys.exit(args[2].tb_lineno)\nraise ValueError": 3,
    "import atexit, sys\natexit.register(lambda: print(sys.excepthook is sys.__excepthook__))\n1 / 0": 1,
    "import threading, time\nthreading.Thread(target=lambda: print(time.sleep(0.1))).start()": 0,
}


@pytest.mark.full
def test_a_fork_ends_as_an_interpreter_of_its_own(run_script: ScriptRunner) -> None:
    """Exit code, traceback and exit hooks are the same."""
    for source, code in ENDS.items():
        alone, forked = (run_script(source, fresh=fresh) for fresh in (True, False))
        assert alone.returncode == code
        assert (forked.returncode, forked.stdout, forked.stderr) == (code, alone.stdout, alone.stderr)


def test_modules_of_the_tests_can_be_preloaded(run_script: ScriptRunner) -> None:
    """Each set of modules has an interpreter of its own."""
    source = "import sys; print('tests.helpers.ports' in sys.modules, 'torch' in sys.modules)"
    assert run_script(source, preload=("tests.helpers.ports",)).stdout == "True False\n"


def is_preloaded(run_script: ScriptRunner, **options: Any) -> bool:
    """Tell whether a program with these options is forked."""
    return run_script("import sys; print('torch' in sys.modules)", **options).stdout == "True\n"


@pytest.mark.full
def test_what_is_read_at_the_start_is_read(run_script: ScriptRunner) -> None:
    """A program has an interpreter of its own for flags, variables that are read early, other modules."""
    for env in (None, with_tests({"RANK": "3"}), with_tests(dict.fromkeys(SET_BY_IMPORTS, "TRUE"))):
        assert is_preloaded(run_script, env=env)
    read = [{"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "0"}, {"PYTHONPATH": str(run_script.folder)}]
    others: list[dict[str, Any]] = [{"python_args": ["-O"]}, {"fresh": True}]
    for options in (*({"env": env} for env in read), *others):
        assert not is_preloaded(run_script, **options)


STARTS_ITSELF = """
    import os, signal, subprocess, sys

    if len(sys.argv) == 1:
        reader, writer = os.pipe()
        for number in range(2):
            command = [sys.executable, "-u", __file__, str(number), str(writer)]
            env = {**os.environ, "RW_GIVEN": "value"}
            popen = subprocess.Popen(command, cwd="/", env=env, pass_fds=[writer], start_new_session=True)
            print(popen.wait(), os.read(reader, 100) == f"{popen.pid}".encode(), flush=True)
    else:
        os.write(int(sys.argv[2]), f"{os.getpid()}".encode())
        facts = [sys.argv[1:2], os.getcwd(), os.environ["RW_GIVEN"], os.getsid(0) == os.getpid()]
        print("torch" in sys.modules, facts, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_what_a_program_starts_can_be_a_fork_too(run_script: ScriptRunner) -> None:
    """It has the folder, variables, descriptors, session and end that `subprocess` gives."""
    result = run_script(STARTS_ITSELF, siblings=1)
    facts = "['{}'], '/', 'value', True]"
    first, second = (f"{forked} [{facts.format(number)}\n" for number, forked in enumerate((True, False)))
    assert result.stdout == f"{first}-9 True\n{second}-9 True\n", result


def test_a_command_reads_stdin(run_script: ScriptRunner) -> None:
    """Any command can be run, and given something to read."""
    result = run_script.command([sys.executable, "-"], stdin="print(6 * 7)")
    assert (result.returncode, result.stdout) == (0, "42\n")


LEAVE_A_SLEEPER = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session={}).pid)"
LEAVE_A_FORK = """
    import os, time
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.write(writer, b"1")
        time.sleep(60)
    os.read(reader, 1)
    print(pid)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "fresh", "command"),
    [
        (LEAVE_A_SLEEPER.format(False), False, "sleep 60"),
        (LEAVE_A_SLEEPER.format(True), False, "sleep 60"),
        (LEAVE_A_FORK, False, ""),
        (LEAVE_A_FORK, True, ""),
    ],
)
def test_an_orphan_fails_the_test(source: str, fresh: bool, command: str, run_script: ScriptRunner) -> None:
    """A process that outlives the program is named and killed, in its session or another, also a fork."""
    running = run_script.start(source, fresh=fresh)
    with pytest.raises(AssertionError, match=f"left 1 processes behind:\n.*{command}") as caught:
        running.finish(leftover_grace_s=0.1)
    orphan = int(str(caught.value).partition("--- stdout ---")[2].split()[0])
    with contextlib.suppress(psutil.NoSuchProcess):  # who adopted it has waited for it
        assert psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_a_program_that_hangs_fails_the_test(run_script: ScriptRunner) -> None:
    """A program over its time is killed, with what it printed in the message."""
    running = run_script.start("import time; print('I sleep', flush=True); time.sleep(60)")
    running.wait_for("I sleep")
    start = time.monotonic()
    raises(AssertionError, r"(?s)ran longer than 0\.5 s.*I sleep", running.finish, timeout=0.5)
    assert time.monotonic() - start < 30


def test_two_programs_of_one_test_are_told_apart(run_script: ScriptRunner) -> None:
    """The end of one program does not wait for another that still runs."""
    path = run_script.write("import time; print('up', flush=True); time.sleep(60)", "first.py")
    first = run_script.start(path)
    first.wait_for("up")
    assert run_script("print('second')").returncode == 0
    first.send_signal(signal.SIGINT)
    result = first.finish(timeout=60)
    assert result.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr


def test_waiting_for_what_never_comes_fails(run_script: ScriptRunner) -> None:
    """A program that ends without printing the text is no reason to wait on."""
    running = run_script.start("print('one')")
    raises(AssertionError, "ended without printing 'two'", running.wait_for, "two")
