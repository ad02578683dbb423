"""Requeueing a Slurm job; `scontrol` is a script of the test's."""

import signal
from pathlib import Path

import pytest

from rankwise.environments import SlurmEnvironment, slurm

STEP = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of the fake `scontrol`, which fails for 99, and hangs for 98."""
    program, asked = tmp_path / "scontrol", tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n[ "$2" != 99 ] || {{ echo no such job >&2; exit 1; }}\n'
        '[ "$2" != 98 ] || exec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return asked


def test_a_job_and_a_task_of_an_array(scontrol: Path) -> None:
    """A job is requeued by its id, a task of an array by the array's id and its own; none by choice."""
    SlurmEnvironment(STEP, auto_requeue=False).requeue()
    assert not scontrol.exists()
    SlurmEnvironment(STEP).requeue()
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "5"}
    SlurmEnvironment({**STEP, **array}).requeue()
    assert scontrol.read_text() == "requeue 17\nrequeue 12_5\n"


def test_a_failed_requeue_is_a_warning(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has already stopped and saved: a controller that refuses or hangs, and none at all."""
    with pytest.warns(UserWarning, match="scontrol requeue 99 failed: no such job"):
        SlurmEnvironment({**STEP, "SLURM_JOB_ID": "99"}).requeue()
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "_REQUEUE_TIMEOUT_S", 2.0)
        with pytest.warns(UserWarning, match=r"scontrol requeue 98 failed: .*timed out"):
            SlurmEnvironment({**STEP, "SLURM_JOB_ID": "98"}).requeue()
    assert scontrol.read_text() == "requeue 99\nrequeue 98\n"
    monkeypatch.setenv("PATH", str(scontrol.parent / "empty"))  # as in a container
    with pytest.warns(UserWarning, match="scontrol requeue 17 failed: .*No such file"):
        SlurmEnvironment(STEP).requeue()


def test_the_signal() -> None:
    """It is SIGUSR1; another signal, or none, can be chosen."""
    assert SlurmEnvironment(STEP).requeue_signal is signal.SIGUSR1
    assert SlurmEnvironment(STEP, requeue_signal=None).requeue_signal is None
    assert SlurmEnvironment(STEP, requeue_signal=signal.SIGUSR2).requeue_signal is signal.SIGUSR2
