"""A real Slurm cluster of two nodes: srun, sbatch, arrays, allocations, unequal tasks, submitit."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster import digits
from tests.cluster.conftest import need
from tests.cluster.digits import BRIEF, DIGITS, check_digits, check_doctor
from tests.cluster.hosts import wait_until
from tests.cluster.slurm import SlurmCluster
from tests.helpers import processes
from tests.helpers.scripts import ScriptResult, ScriptRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

SCRIPTS = digits.EXAMPLES / "slurm"
REQUEUED_EPOCHS = 12
DOCTOR = "python -m rankwise doctor"
TRAINING = shlex.join(["python", str(DIGITS), *BRIEF])


class User:
    """A user who is logged in on the first node, in the repository's folder."""

    def __init__(self, cluster: SlurmCluster, runner: ScriptRunner) -> None:
        self.cluster = cluster
        self._runner = runner
        self.folder = runner.folder
        self.names = cluster.hosts.names

    def run(self, *words: str) -> ScriptResult:
        """Give a command."""
        env = {**digits.VARIABLES, **self.cluster.variables}
        command = self.cluster.command(*words)
        return self._runner.command(command, env=env, cwd=digits.REPOSITORY, timeout=digits.LIMIT_S)

    def submit(self, script: Path, *options: str, arguments: Sequence[str] = BRIEF) -> str:
        """Submit a job script, and return the job's id."""
        output = f"--output={self.folder}/%x-%A-%a.out"
        # The job inherits the environment: its processes belong to the test, not to sbatch, which has ended.
        marker = f"{processes.MARKER}={os.environ[processes.MARKER]}"
        command = ("env", marker, "sbatch", "--parsable", output, *options, str(script), *arguments)
        submitted = self.run(*command)
        assert submitted.returncode == 0, submitted
        return submitted.stdout.strip()

    def wait_for_output(self, job: str, text: str) -> None:
        """Wait until a job has printed something."""
        what = f"job {job} has printed {text!r}"
        wait_until(lambda: any(text in output for output in self.outputs(job)), what, 90)

    def outputs(self, job: str) -> list[str]:
        """Return what a job, or each of an array, has printed so far."""
        paths = sorted(self.folder.glob(f"*-{job}-*.out"))
        return [path.read_text(errors="replace") for path in paths]  # it may be in the middle of a character

    def finish(self, job: str) -> list[str]:
        """Wait until a job has ended well, or all jobs of an array, and return what each has printed."""
        states = self.cluster.wait_for_job(job, timeout_s=digits.LIMIT_S)
        outputs = self.outputs(job)
        assert states == {"COMPLETED"}, (states, outputs)
        return outputs


@pytest.fixture
def user(slurm: SlurmCluster, run_script: ScriptRunner) -> Iterator[User]:
    yield User(slurm, run_script)
    slurm.ask("scancel", "--user=root")  # what a failed test has left


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_batch_jobs_in_an_array(jobs: int, user: User) -> None:
    """Each job of an array trains on two ranks of its own; two jobs share both nodes at the same time."""
    outputs = user.finish(user.submit(SCRIPTS / "digits.sh", f"--array=1-{jobs}"))
    assert len(outputs) == jobs
    for output in outputs:
        check_doctor(output, "slurm", world_size=2)
        check_digits(output, node_ranks=[0, 1], hosts=user.names)


@pytest.mark.soak
def test_unequal_tasks(user: User) -> None:
    """With --ntasks alone, three tasks fall on two nodes as 2 and 1, and all train."""
    step = "srun --ntasks=3"
    result = user.run("bash", "-c", f"{step} {DOCTOR} && {step} {TRAINING}")
    assert result.returncode == 0, result
    check_doctor(result.stdout, "slurm", world_size=3)
    check_digits(result.stdout, node_ranks=[0, 0, 1], hosts=user.names)


@pytest.mark.soak
def test_a_batch_script_without_srun(user: User) -> None:
    """One task with a notebook's job name and devices=2 is two local processes, which see all of the data."""
    [output] = user.finish(user.submit(SCRIPTS / "one_node.sh", "--job-name=ood-jupyter"))
    check_doctor(output, "local", world_size=2)
    check_digits(output, node_ranks=[0, 0], hosts=user.names)


def test_a_batch_script_of_two_tasks_without_srun(user: User) -> None:
    """The batch step of a job with two tasks is one process: it is local, and the doctor says to use srun."""
    script = user.folder / "job.sh"
    script.write_text("#!/bin/bash\nexec python -m rankwise doctor --no-start-methods\n")
    [output] = user.finish(user.submit(script, "--ntasks=2", "--nodes=2", arguments=()))
    check_doctor(output, "local", world_size=2)
    assert "put srun before the command" in output, output


@pytest.mark.soak
def test_an_interactive_allocation(user: User) -> None:
    """In an allocation a plain command is one local process; srun starts the ranks."""
    inside = f"{DOCTOR} --no-start-methods && srun {DOCTOR}"
    result = user.run("salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", inside)
    assert result.returncode == 0, result
    alone, together = re.split(r"(?=^Versions$)", result.stdout, flags=re.MULTILINE)[1:]
    check_doctor(alone, "local", world_size=2)
    assert "put srun before the command" in alone, alone
    check_doctor(together, "slurm", world_size=2)
    assert "reached through interface eth0" in together, together


def test_a_step_of_two_tasks_on_one_node(user: User) -> None:
    """--ntasks alone, on one node, gives two ranks that connect on loopback."""
    result = user.run("srun", "--ntasks=2", *DOCTOR.split())
    assert result.returncode == 0, result
    check_doctor(result.stdout, "slurm", world_size=2)
    assert "listen on loopback only" in result.stdout, result


@pytest.mark.soak
def test_devices_that_are_not_there(user: User) -> None:
    """A step of two tasks asked for three processes each is an error on every rank, with both numbers."""
    result = user.run("srun", "--ntasks=2", "python", str(DIGITS), "--devices", "3")
    assert result.returncode == 1, result
    assert result.stderr.count("WorldSizeMismatchError: ") == 2, result
    assert "samples per epoch" not in result.stdout, result


@pytest.mark.soak
def test_submitit(user: User) -> None:
    """Submitit's executor submits the doctor and the same script from Python."""
    try:
        import submitit  # noqa: F401  the program that is run needs it
    except ImportError:
        need("submitit not installed")
    program = SCRIPTS / "submitit_digits.py"
    result = user.run("python", str(program), str(user.folder / "jobs"), *BRIEF)
    assert result.returncode == 0, result
    check_doctor(result.stdout, "slurm", world_size=2)
    check_digits(result.stdout, node_ranks=[0, 1], hosts=user.names)


@pytest.mark.parametrize(
    "cut_short",
    [("scancel", "--signal=USR1"), pytest.param(("scontrol", "requeue"), marks=pytest.mark.soak)],
    ids=["signal", "scontrol"],
)
def test_requeueing(cut_short: Sequence[str], user: User) -> None:
    """A job that is interrupted within an epoch is requeued, and ends with the same weights, bit for bit."""
    epochs = ("--max-epochs", str(REQUEUED_EPOCHS))
    script = SCRIPTS / "requeue.sh"
    job = user.submit(script, arguments=(str(user.folder / "cut"), *epochs))
    user.wait_for_output(job, "epoch 1\n")
    user.cluster.ask(*cut_short, job)
    # The other one trains while the first waits to be started again, for which Slurm takes two minutes.
    whole = user.submit(script, arguments=(str(user.folder / "whole"), *epochs))
    [uncut] = user.finish(whole)
    if user.cluster.job_states(job) == {"PENDING"}:
        user.cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    [cut] = user.finish(job)
    begun = [int(step) for step in re.findall(r"training from step (\d+)", cut)]
    assert len(begun) == 2, cut
    assert begun[0] == 0 < begun[1] < REQUEUED_EPOCHS * 57, cut
    assert ending(cut) == ending(uncut), (cut, uncut)
    assert ending(cut).startswith(f"{REQUEUED_EPOCHS * 57} steps, weights "), cut


def ending(text: str) -> str:
    """What the script says last, wherever in a line: other tasks may print in between."""
    return str(re.findall(r"\d+ steps, weights \w+", text)[-1])
