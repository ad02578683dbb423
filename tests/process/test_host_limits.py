"""Programs in which a job cannot be started, or that use what a job uses, too."""

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process import host_cases
from tests.process.helpers import Cases, cases_of, combinations
from tests.process.test_host_programs import ALL_METHODS, ELASTIC, METHODS, by_seccomp

cases = cases_of(host_cases)


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_patched_threads(method: str, cases: Cases) -> None:
    """What replaces Python's threads is refused by name."""
    result = cases("patched_threads", method, "2")
    assert "LaunchRefusedError" in result.stdout, result
    assert "gevent has replaced Python's threads" in result.stdout, result
    assert "start_new_thread() is gevent.thread's" in result.stdout, result


@pytest.mark.parametrize("world_size", [1, 2])
def test_patched_threads_where_ranks_exist(world_size: int, cases: Cases) -> None:
    """A rank that another launcher has started refuses them too, unless it is alone."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    result = cases("patched_threads", "popen", "auto", env={**places, **address})
    assert ("gevent has replaced Python's threads" in result.stdout) == (world_size == 2), result
    assert ("fine" in result.stdout) == (world_size == 1), result


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_too_few_files(method: str, cases: Cases) -> None:
    """The limit is named before anything is started, or the job works; nothing is left."""
    result = cases("few_files", method)
    assert result.returncode == 0, result
    *refused, last = [text for text in result.stdout.split("\n\n") if text.strip()]
    assert refused, result
    for text in refused:
        assert "LaunchRefusedError: The ranks cannot be started: this process may open no more files" in text
        assert "ulimit -n" in text, result
    assert last.split() == ["61", "fine"], result


@by_seccomp
@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
@pytest.mark.parametrize("situation", ["processes", "memory", "threads"])
def test_too_few_processes(situation: str, method: str, cases: Cases) -> None:
    """The limit is named, and no process is left."""
    result = cases("few_processes", situation, method)
    assert result.returncode == 0, result
    memory, user = "there is not enough memory for another process", "this user may start no more processes"
    problem = memory if situation == "memory" else f"{user} or threads"
    assert f"The ranks cannot be started: {problem}" in result.stdout, result


# One program launches by several methods: where a launch is refused, nothing has been started.
REMOVED = """
    import os, sys
    import torch

    if sys.argv[1] == "before":
        os.rmdir(os.getcwd())

    import rankwise
    from rankwise.strategies import DDPElasticStrategy, DDPStrategy

    def good(strategy):
        return "fine"

    def launch(method):
        agent, _, start_method = method.rpartition("-")
        strategy = DDPElasticStrategy if agent else DDPStrategy
        return strategy(accelerator="cpu", devices=2, start_method=start_method).launch(good)

    if __name__ == "__main__":
        if sys.argv[1] == "after":
            os.rmdir(os.getcwd())
            os.chdir(sys.path[0])
        for method in sys.argv[2:]:
            try:
                print("---", method, launch(method), flush=True)
            except Exception as error:
                print("---", method, type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize(
    ("when", "methods"),
    [
        ("before", ALL_METHODS),
        ("after", ("fork", "elastic-fork", "popen")),
        pytest.param("after", ALL_METHODS, marks=pytest.mark.soak),
    ],
)
def test_a_working_directory_that_has_been_removed(
    when: str, methods: tuple[str, ...], run_script: ScriptRunner
) -> None:
    """The package can be imported; a launch is refused, by whichever method.

    Where the program has gone to another directory only a script is, which would be run again in the first.
    """
    (folder := run_script.folder / "started_in").mkdir()
    result = run_script(REMOVED, when, *methods, cwd=folder)
    assert result.returncode == 0, result
    outcomes = dict(line.split(maxsplit=1) for line in result.stdout.split("--- ") if line)
    assert sorted(outcomes) == sorted(methods)
    refused = methods if when == "before" else ("popen",)
    assert {outcomes[method].strip() for method in methods if method not in refused} <= {"fine"}
    problem = {
        "before": "cannot be started where the working directory has been removed",
        "after": "the folder that it was started in has been removed",
    }[when]
    for method in refused:
        assert outcomes[method].startswith("LaunchRefusedError"), outcomes
        assert problem in outcomes[method], outcomes


@pytest.mark.parametrize(
    ("how", "method"),
    combinations(
        ("handler", "default", "before"),
        ("fork", "popen", "spawn", "forkserver"),
        quick=[("handler", "popen"), ("default", "fork"), ("before", "fork")],
    ),
)
def test_a_rank_that_handles_sigusr2(how: str, method: str, cases: Cases) -> None:
    """The supervisor asks for its stacks by another signal, and the signal reaches the user's handler."""
    result = cases("handles_sigusr2", method, how, siblings=int(method == "popen"))
    assert "WorkerTimedOutError (1,)" in result.stdout, result
    assert "time.sleep" in result.stderr or ", line" in result.stderr, result
    expected = 0 if how != "before" or method in ("spawn", "forkserver") else 1
    assert result.stdout.count("own handler") == expected, result


def test_a_script_that_forks_after_a_job(cases: Cases) -> None:
    """The child has no part in the script's processes: it may not launch with them, and exits by itself."""
    result = cases("forks_after_a_job", siblings=1)
    assert (result.returncode, result.stderr) == (0, ""), result
    for rank in range(2):
        launch = result.stdout.partition(f"launch of {rank}:\n")[2].splitlines()[0]
        assert launch.startswith("LaunchRefusedError"), result
        assert "No job can start in a process that a rank has forked" in launch, result
        assert f"child of {rank}: 0\n" in result.stdout, result
        assert f"child of {rank}: 3\n" in result.stdout, result
        assert result.stdout.count(f"after {rank}: fine\n") == 2, result


@pytest.mark.parametrize("method", METHODS)
def test_a_launch_leaves_no_descriptors(method: str, cases: Cases) -> None:
    """All are closed at its end, not when garbage is collected, nor kept for a status that nobody knows."""
    result = cases("descriptors", method)
    assert result.returncode == 0, result
    for situation in ("default", "ignored"):
        assert result.stdout.count(f"{situation} 0 0\n") == (2 if method == "popen" else 1), result
