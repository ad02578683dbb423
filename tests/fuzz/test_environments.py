"""Damaged environment variables, and node lists of Slurm: an error of ours names what cannot be right."""

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from rankwise.doctor.examination import examine_network
from rankwise.environments import detect_environment
from rankwise.environments.network import is_loopback, port_of_job
from rankwise.environments.slurm import expand_counts, expand_node_list, warn_of_unused_tasks
from rankwise.errors import RankwiseError
from rankwise.launchers.context import WorkerContext, describe_context
from rankwise.launchers.worker_main import attach
from rankwise.process_group.group import check_interface
from rankwise.ranks import RankInfo, set_rank_zero_only
from rankwise.start import CONTEXT_VARIABLE, JOB_KEY
from rankwise.stores.rendezvous import current_restart
from rankwise.stores.sealed import job_key_of_environment
from rankwise.strategies import DDPStrategy
from tests.fuzz.inputs import Fuzzing, damaged_json, text_from
from tests.unit.environments import variables

LAUNCHERS = (
    *(variables.torchrun(), variables.step(), variables.batch(), variables.open_mpi(3, 4, 1, 2)),
    *(variables.step(2, "2(x2),1", "gpu[01-03]", place=(1, 0)), variables.hydra(), variables.jsrun(3, 4, 2)),
    *(variables.pals(), variables.pod(), variables.plain(), variables.by_hand()),
    *(variables.train_job(), variables.skypilot(), variables.sagemaker(), variables.submitit_local()),
)
NODE_LISTS = ("gpu[08-10,3]", "login", "r[1-2]n[01-02]x", "n[1-", "]", "9", ",", "[", "1-3", "ip-10-0-0-1.eu")
COUNTS = ("2(x3)", "1", "4", "(x", ")", "9", ",")


@pytest.mark.quick
def test_launchers(fuzzing: Fuzzing) -> None:
    """The ranks, the address and the port that variables give, or our error."""

    def parse(random: Random) -> None:
        launcher = random.choice(LAUNCHERS)
        names = random.choices([*launcher, "LSB_DJOB_RANKFILE", "MASTER_PORT"], k=random.randrange(1, 4))
        environ = {**launcher, **{name: text_from(random, list(launcher.values())) for name in names}}
        for name in random.choices(names, k=random.randrange(2)):
            del environ[name]
        if random.random() < 0.02:
            environ["RANKWISE_ENVIRONMENT"] = text_from(random, ("local", "slurm", "plain", "mpi"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warn_of_unused_tasks(environ, 1)
            environment = detect_environment(environ).environment
        assert 0 <= environment.ranks.global_rank < environment.ranks.world_size
        if environment.name != "mpi" or environment.num_nodes == 1:  # mpi4py would start a job
            assert 1 <= environment.main_port <= 65535
            is_loopback(environment.main_address)

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_node_lists(fuzzing: Fuzzing) -> None:
    """Names of nodes, not too many and not too long; or our error."""

    def parse(random: Random) -> None:
        names = expand_node_list(text_from(random, NODE_LISTS))
        assert 0 < len(names) <= 100_000
        assert max(map(len, names)) < 1000

    assert 0 < fuzzing.run(parse) < fuzzing.count


def test_counts(fuzzing: Fuzzing) -> None:
    """Counts of tasks, or our error; and any texts give a port."""

    def parse(random: Random) -> None:
        assert 20_000 <= port_of_job([text_from(random, COUNTS)]) < 32_000
        counts = expand_counts(text_from(random, COUNTS))
        assert 0 < len(counts) <= 100_000

    assert 0 < fuzzing.run(parse) < fuzzing.count


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process in the block, as the kernel could: without zero bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, os.fsdecode(value.encode(errors="surrogatepass").replace(b"\0", b"")))
        yield


READERS: dict[str, Callable[[], Any]] = {
    "TORCHELASTIC_RESTART_COUNT": current_restart,
    "RANKWISE_CHECK_COLLECTIVES": lambda: DDPStrategy(accelerator="cpu", devices=1),
    JOB_KEY: job_key_of_environment,
    "NCCL_SOCKET_IFNAME": lambda: examine_network(os.environ, None, {}),
    "GLOO_SOCKET_IFNAME": check_interface,
}


@pytest.mark.parametrize("name", READERS)
def test_variables_of_this_process(fuzzing: Fuzzing, name: str) -> None:
    """The error names the variable."""

    def parse(random: Random) -> None:
        text = text_from(random, ("0", "1", "eth0", "lo", "0123456789abcdef"))
        with variable_set(name, text):
            try:
                READERS[name]()
            except RankwiseError as error:
                assert name in str(error)  # noqa: PT017
                raise

    assert fuzzing.run(parse) > 0


def test_rank_of_the_first_import(fuzzing: Fuzzing) -> None:
    """What is no rank is none: the package is imported all the same."""

    def parse(random: Random) -> None:
        with variable_set(random.choice(("RANK", "SLURM_PROCID")), text_from(random, ("0", "1", "12"))):
            set_rank_zero_only(None)

    before = set_rank_zero_only(None)
    try:
        assert fuzzing.run(parse) == fuzzing.count
    finally:
        set_rank_zero_only(before)


def test_description_of_a_worker(fuzzing: Fuzzing) -> None:
    """A script whose variable is damaged is refused; one of another process goes on without."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        files = dict.fromkeys(("channel", "heartbeat", "values"), ours.fileno())
        text = describe_context(WorkerContext(RankInfo(1, 1, 0, 2, 2, 1)), files)
    plain = {**json.loads(text), "channel": 1 << 20}  # which is not open, nor is the socket

    def parse(random: Random) -> None:
        try:
            attach(damaged_json(random, plain).decode(errors="replace"))
        except RankwiseError as error:
            assert CONTEXT_VARIABLE in str(error)  # noqa: PT017  it may also go on
            raise

    assert 0 < fuzzing.run(parse) < fuzzing.count
