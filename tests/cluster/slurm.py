"""A Slurm cluster of two nodes on this machine, with Slurm's own daemons."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.cluster.hosts import TwoHosts, wait_until
from tests.helpers import processes

PROGRAMS = (
    *("slurmctld", "slurmd", "munged", "mungekey"),
    *("srun", "sbatch", "salloc", "scancel", "scontrol", "sinfo"),
)
_LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING"}
_PATH = os.pathsep.join(["/usr/sbin", "/usr/bin", "/sbin", "/bin"])

# cred_expire is also how long a requeued job waits before it starts again.
_CONFIGURATION = """
ClusterName=two
SlurmctldHost={main}({main_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
MinJobAge=300
KillWait=20
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Two nodes, `hosta` and `hostb`, with two CPUs each. Commands are given on `hosta`."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self._started: list[psutil.Process] = []

    @staticmethod
    def problem() -> str | None:
        """Return why Slurm cannot be started here."""
        missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
        return f"{', '.join(missing)} not installed (slurm-wlm, munge)" if missing else TwoHosts.problem()

    @property
    def variables(self) -> Mapping[str, str]:
        """What Slurm's commands need in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs `words` on the node where users log in."""
        return self.hosts.command(self.hosts.names[0], words)

    def ask(self, *words: str) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        environment = {**os.environ, **self.variables}
        done = subprocess.run(
            self.command(*words), env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def job_states(self, job: str) -> set[str]:
        """Return the states of a job, or of all jobs of an array."""
        return set(re.findall(r"\bJobState=(\w+)", self.ask("scontrol", "--oneliner", "show", "job", job)))

    def wait_for_job(self, job: str, timeout_s: float) -> set[str]:
        """Wait until a job has ended (`sbatch --wait` looks too rarely); cancel it where it does not."""
        try:
            wait_until(lambda: not self.job_states(job) & _LIVING, f"job {job} has ended", timeout_s)
        except RuntimeError:
            self.ask("scancel", job)
            raise
        return self.job_states(job)

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self._write_configuration()
        main = self.hosts.names[0]
        munge = {name: str(self.folder / f"munge.{name}") for name in ("sock", "key", "pid", "log", "seed")}
        subprocess.run([_find("mungekey"), "--create", f"--keyfile={munge['key']}"], check=True)
        options = [f"--{option}={munge[name]}" for option, name in _MUNGE_OPTIONS.items()]
        self._start_daemon([_find("munged"), "--force", *options], main, munge["pid"])
        configuration = self.variables["SLURM_CONF"]
        self._start_daemon([_find("slurmctld"), "-f", configuration], main, "slurmctld.pid")
        for name in self.hosts.names:
            self._start_daemon([_find("slurmd"), "-f", configuration, "-N", name], name, f"slurmd.{name}.pid")
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "both nodes are idle")

    def stop(self) -> None:
        """Stop what was started, last first, and wait for its end."""
        while self._started:
            daemon = self._started.pop()
            with contextlib.suppress(psutil.NoSuchProcess):
                daemon.terminate()
            if left := processes.wait_until_gone(lambda daemon=daemon: [daemon], timeout_s=10):  # type: ignore[misc]  # mypy infers no default's type
                processes.kill(left)

    def _write_configuration(self) -> None:
        hosts = zip(self.hosts.names, self.hosts.addresses, strict=True)
        nodes = [f"NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN" for name, address in hosts]
        text = _CONFIGURATION.format(
            folder=self.folder,
            main=self.hosts.names[0],
            main_address=self.hosts.addresses[0],
            nodes="\n".join(nodes),
            names=",".join(self.hosts.names),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *(f"spool.{name}" for name in self.hosts.names)):
            (self.folder / name).mkdir()

    def _start_daemon(self, command: Sequence[str], host: str, pid_file: str) -> None:
        """Start a program that becomes a daemon and writes its pid to a file."""
        done = subprocess.run(
            self.hosts.command(host, command),
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}")
        path = self.folder / pid_file
        wait_until(lambda: path.exists() and path.read_text().strip() != "", f"{command[0]} has started")
        self._started.append(psutil.Process(int(path.read_text())))


_MUNGE_OPTIONS = {"socket": "sock", **{f"{name}-file": name for name in ("key", "pid", "log", "seed")}}


def _find(program: str) -> str:
    return shutil.which(program, path=_PATH) or program
