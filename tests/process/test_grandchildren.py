"""What ends with a killed rank or agent, in whatever state it is."""

import signal

import pytest

from tests.helpers.load import slowdown
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import METHODS as FROM_A_PROCESS
from tests.process.helpers import combinations

METHODS = (*FROM_A_PROCESS, "popen")
STATES = ("busy", "stopped")

FORKS = """
    import os, signal, sys, time
    from pathlib import Path
    from rankwise.errors import WorkerKilledError
    from rankwise.strategies import DDPStrategy

    PID = Path("pid")

    def fork(state):
        if os.fork() == 0:
            PID.write_text(str(os.getpid()))
            if state == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            sum(range(10**12))  # in one call of C code, with the interpreter's lock
        while not PID.exists() or not PID.read_text():
            time.sleep(0.01)

    def is_gone():
        try:
            return Path(f"/proc/{PID.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def job(strategy, state, end):
        strategy.barrier()
        if strategy.global_rank == 1:
            fork(state)
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
            while not is_gone():
                time.sleep(0.01)
            print("gone")
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
    result = run_script(FORKS, method, state, end, siblings=1)
    found, gone = result.stdout.split()
    assert (result.returncode, gone) == (0, "gone"), result
    assert found == "1" if end == "killed" else float(found) < 4 * slowdown(), result


AGENT = """
    import os, resource, sys
    from rankwise.strategies import DDPElasticStrategy

    def job(strategy, state):
        strategy.barrier()
        print("up", flush=True)
        _, pipe = os.pipe()
        while state == "writing":
            os.write(pipe, bytes(1 << 16))  # which nobody reads
        sum(range(10**12))

    if __name__ == "__main__":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard > 2048:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        options = {"start_method": sys.argv[1], "max_restarts": 0}
        DDPElasticStrategy(accelerator="cpu", devices=2, **options).launch(job, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("state", "method"), combinations(("busy", "writing"), FROM_A_PROCESS, quick=[("busy", "fork")])
)
def test_the_ranks_of_a_killed_agent(state: str, method: str, run_script: ScriptRunner) -> None:
    """They end with it, while C code holds the lock, or in a write, and with more than 1,024 open files."""
    running = run_script.start(AGENT, method, state, fresh=True)
    running.wait_for("up", count=2)
    running.send_signal(signal.SIGKILL)
    assert running.finish(leftover_grace_s=20).returncode == -signal.SIGKILL
