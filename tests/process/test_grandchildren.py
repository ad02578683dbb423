"""What ends with a killed rank or agent, in whatever state it is."""

import pytest

from tests.helpers.load import slowdown
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import METHODS as FROM_A_PROCESS
from tests.process.helpers import combinations

METHODS = (*FROM_A_PROCESS, "popen")
STATES = ("busy", "stopped")

WAIT = """
    import os, signal, sys, time
    from pathlib import Path

    def be_child(state, path):
        Path(path).write_text(str(os.getpid()))
        if state == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        sum(range(10**12))  # in one call of C code, with the interpreter's lock

    def fork(state, path):
        if os.fork() == 0:
            be_child(state, path)
        while not Path(path).exists() or not Path(path).read_text():
            time.sleep(0.01)

    def is_gone(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def wait_until_gone(pids):
        while not all(map(is_gone, pids)):
            time.sleep(0.01)
        print("gone", flush=True)
"""

FORKS = """
    from rankwise.errors import WorkerKilledError
    from rankwise.strategies import DDPStrategy

    def job(strategy, state, end):
        strategy.barrier()
        if strategy.global_rank == 1:
            fork(state, "pid")
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL) if strategy.global_rank == 1 else time.sleep(60)
        return time.monotonic()

    if __name__ == "__main__":
        strategy = DDPStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1])
        try:
            ended_s = strategy.launch(job, *sys.argv[2:])
            result = time.monotonic() - ended_s
        except WorkerKilledError as error:
            result = error.global_rank
        if strategy.is_global_zero:
            print(result, flush=True)
            wait_until_gone([int(Path("pid").read_text())])
"""


KILLED = [("busy", "fork", "killed"), ("stopped", "popen", "killed")]
LEFT = [("busy", "popen", "left"), ("stopped", "fork", "left")]


# By default these are all pairs of two of the values.
@pytest.mark.parametrize(
    ("state", "method", "end"),
    combinations(STATES, METHODS, ("killed", "left"), quick=[*KILLED, *LEFT]),
)
def test_a_process_that_a_rank_has_forked(
    state: str, method: str, end: str, run_script: ScriptRunner
) -> None:
    """It ends with the rank, also while C code holds its interpreter's lock, or while it is suspended.

    A launch whose ranks have returned does not wait for it.
    """
    result = run_script(WAIT + FORKS, method, state, end, siblings=1)
    found, gone = result.stdout.split()
    assert (result.returncode, gone) == (0, "gone"), result
    assert found == "1" if end == "killed" else float(found) < 4 * slowdown(), result


AGENT = """
    import resource, subprocess
    from rankwise.strategies import DDPElasticStrategy

    def job(strategy, state):
        strategy.barrier()
        Path(f"rank{strategy.global_rank}").write_text(str(os.getpid()))
        while state == "writing":
            os.write(1, bytes(1 << 16))  # which nobody reads
        sum(range(10**12))

    def be_agent(method, state):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard > 2048:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        strategy = DDPElasticStrategy(accelerator="cpu", devices=2, start_method=method, max_restarts=0)
        strategy.launch(job, state)

    def pids():
        return [path.read_text() for path in sorted(Path().glob("rank?"))]

    if __name__ == "__main__" and len(sys.argv) == 3:
        be_agent(*sys.argv[1:])
    elif __name__ == "__main__":
        command = [sys.executable, *sys.argv[:3]]
        agent = subprocess.Popen(command, stdout=subprocess.PIPE if sys.argv[2] == "writing" else None)
        while len(pids()) < 2 or not all(pids()):
            time.sleep(0.05)
        agent.kill()
        agent.wait()
        wait_until_gone(map(int, pids()))
"""


@pytest.mark.parametrize(
    ("state", "method"), combinations(("busy", "writing"), FROM_A_PROCESS, quick=[("busy", "fork")])
)
def test_the_ranks_of_a_killed_agent(state: str, method: str, run_script: ScriptRunner) -> None:
    """They end with it, while C code holds the lock, or in a write, and with more than 1,024 open files."""
    result = run_script(WAIT + AGENT, method, state, "main")
    assert result.stdout == "gone\n", result
