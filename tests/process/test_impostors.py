"""A process that takes a rank's place in gloo runs no code and reads no object; its error says so."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankwise.errors import ConfigurationError, WorkerRaisedError
from rankwise.process_group.authentication import key_of
from rankwise.process_group.collectives import broadcast_bytes
from rankwise.stores.sealed import CODE_BYTES
from rankwise.strategies import DDPStrategy, Strategy
from tests.helpers.ports import free_port
from tests.helpers.raising import raises
from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.process.helpers import METHODS, ddp, with_tests
from tests.process.impostor import MakesFile
from tests.process.impostor_jobs import SECRET

SCRIPT = Path(__file__).with_name("impostor_jobs.py")
Place = tuple[str, dict[str, str | None]]
Attack = Callable[..., Counter[str]]
"""The job, the start method, the rank that is late, the number of nodes; returns what happened."""
ALL_WELL = f"ENDED {SECRET} 3.0"


@pytest.fixture(scope="module")
def beside_a_stranger() -> Iterator[Place]:
    """Give a network namespace, and variables, for a job that another user, if we are root, attacks."""
    name = f"rankwise-impostor-{os.getpid()}"
    is_possible = os.getuid() == 0 and shutil.which("ip") is not None and Path("/usr/bin/python3").exists()
    if not is_possible or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        yield "", {}
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name, {"STRANGER": "65534"}
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def attack(beside_a_stranger: Place, run_script: ScriptRunner) -> Iterator[Attack]:
    namespace, stranger = beside_a_stranger
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # `tmp_path` is closed to another user
        Path(name).chmod(0o711)

        def run(job: str, start_method: str, late: int, nodes: int = 1, **more: str | None) -> Counter[str]:
            folder = Path(tempfile.mkdtemp(dir=name))
            folder.chmod(0o777)
            arguments = (job, start_method, str(folder), str(nodes))
            start = partial(run_script.start, SCRIPT, *arguments, place=(namespace, ""))
            variables = {"LATE": str(late), **stranger, **more}
            if nodes > 1:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                variables |= {"NNODES": str(nodes), **address}
            variables = with_tests(variables)
            started = [start(env={**variables, "NODE_RANK": str(node)}) for node in range(nodes)]
            results = [each.finish() for each in started]
            for result in results:
                check(result, folder)
                assert "impostor.py" not in result.stderr, result  # it has not failed
            return Counter(
                tries=1,
                connected=(folder / "taken").exists(),
                ended_with_our_error=any("PeerAuthenticationError" in each.stdout for each in results),
                went_on=all(ALL_WELL in each.stdout for each in results),
            )

        yield run


def check(result: ScriptResult, folder: Path) -> None:
    assert not (folder / "code_was_run").exists(), result
    read = folder / "read"
    assert not read.exists() or SECRET not in read.read_text(), result
    texts = ["is connected to another process in place of rank", "No rank of the job has written"]
    if torch.__version__ < "2.8":  # gloo itself fails when the impostor closes a connection too early
        texts.append("Gloo connectFullMesh failed with")
    says_so = any(text in result.stdout for text in texts)
    assert says_so or ALL_WELL in result.stdout, result


@pytest.mark.parametrize(
    ("job", "late"),
    [
        *(pytest.param("new_group", late, marks=pytest.mark.quick) for late in (0, 1)),
        *(("forged_outcomes", 1), pytest.param("forged_outcomes", 0, marks=pytest.mark.soak)),
    ],
)
def test_a_new_group_that_a_rank_comes_late_to(job: str, late: int, attack: Attack) -> None:
    """Each group that the launched function makes is compared before torch's own function uses it.

    A rank that finds an impostor raises that, whatever the store says of the comparison.
    """
    assert attack(job, "fork", late)["ended_with_our_error"]


@pytest.mark.parametrize(
    "variable",
    [pytest.param("TORCH_DISTRIBUTED_DEBUG=DETAIL", marks=pytest.mark.soak), "GLOO_SOCKET_IFNAME=lo,lo"],
)
def test_the_further_connections_of_a_group(variable: str, attack: Attack) -> None:
    """Those of torch's debug mode, and of a second interface, are compared too."""
    name, _, value = variable.partition("=")
    tries = (attack("new_group", "fork", 1, **{name: value}) for _ in range(5))  # torch 2.6 may need several
    assert any(seen["ended_with_our_error"] for seen in tries)


CASES = [("broadcast", "fork", 1), ("broadcast", "fork", 2), ("fit", "elastic", 1)]
LONG = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("job", "start_method", "nodes", "tries"),
    [
        *((*case, 1) for case in CASES[:2]),
        *(pytest.param(*case, 40, marks=LONG) for case in (*CASES, ("new_group", "fork", 1))),
    ],
)
def test_attacks(job: str, start_method: str, nodes: int, tries: int, attack: Attack) -> None:
    """The default group is compared before the first object and the first tensor.

    In many tries each rank is late in turn, by each start method; the impostor takes a place in some of them.
    """
    seen = Counter[str]()
    for number in range(1, tries + 1):
        methods = ("fork", "spawn", "forkserver", "popen") if start_method == "fork" else (start_method,)
        method = methods[number // (2 * nodes) % len(methods)]
        seen += attack(job, method, number % (2 * nodes), nodes)
        print(job, method, f"{nodes} nodes:", dict(seen), flush=True)
    assert seen["ended_with_our_error"] + seen["went_on"] == tries
    assert seen["ended_with_our_error"] or tries == 1


@pytest.mark.soak
@pytest.mark.parametrize("late", [0, 1])
def test_an_impostor_that_says_nothing(late: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """The comparison ends after `init_timeout`, and the error says what may have happened."""
    command = [sys.executable, str(SCRIPT), "new_group", "fork", str(tmp_path)]
    result = run_script.start_command(command, env=with_tests({"LATE": str(late), "SILENT": "1"})).finish()
    assert "compared whether they are connected to each other" in result.stdout, result
    assert "or another process has taken its place" in result.stdout, result


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start_method", [*METHODS, "popen", "elastic"])
def test_a_default_group_that_the_user_creates(start_method: str, attack: Attack) -> None:
    """Torch's own `init_process_group` and object functions in a job without a group of the strategy's."""
    seen = sum((attack("own_group", start_method, number % 2) for number in range(10)), Counter[str]())
    assert seen["ended_with_our_error"]


def test_nodes_with_different_keys(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Whoever lacks the key is no rank of the job, whatever the store says; the same key is no obstacle."""
    start = partial(run_script.start, SCRIPT, "broadcast", "fork", str(tmp_path), "2")
    problem = "PeerAuthenticationError: No rank of the job has written"
    for keys, expected in ((("k" * 32, "k" * 32), ALL_WELL), (("k" * 32, None), problem)):
        job = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LATE": "-1"}
        nodes = [{**job, "NODE_RANK": str(node), "RANKWISE_JOB_KEY": key} for node, key in enumerate(keys)]
        results = [run.finish() for run in [start(env=with_tests(variables)) for variables in nodes]]
        assert all(expected in result.stdout for result in results), results


def test_a_key_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything starts."""
    monkeypatch.setenv("RANKWISE_JOB_KEY", "secret")
    raises(ConfigurationError, "RANKWISE_JOB_KEY has 6 characters, which can be guessed", ddp("fork").bind)


class OtherTorch(DDPStrategy):
    """Its torch creates gloo groups by another name than rankwise expects."""

    def setup_environment(self) -> None:
        private: Any = distributed_c10d
        plain = private._new_process_group_helper

        def create(*args: Any, **kwargs: Any) -> Any:
            private.ProcessGroupGloo = dist.ProcessGroupGloo
            return plain(*args, **kwargs)

        private._new_process_group_helper = create
        super().setup_environment()


def test_a_torch_whose_groups_would_not_be_compared() -> None:
    """It is refused by name when a job begins."""
    strategy = OtherTorch(start_method="fork", accelerator="cpu", devices=2)
    problem = r"ProcessGroupError: torch 2\.\S+ creates gloo groups in a way"
    with pytest.raises(WorkerRaisedError, match=problem):
        strategy.launch(lambda _: None)


def receive_forged(strategy: Strategy, path: str, filler: str) -> None:
    """Take what comes as rank 1's object; rank 1 sends one with a code of zeros."""
    if strategy.global_rank == 0:
        strategy.broadcast(None, src=1)
    else:
        forged = bytearray(bytes(CODE_BYTES) + pickle.dumps([MakesFile(path), filler]))
        broadcast_bytes(torch.frombuffer(forged, dtype=torch.uint8), 1, dist.group.WORLD)
        strategy.barrier()


@pytest.mark.parametrize("size", [0, 10_000])
def test_an_object_that_no_rank_has_sent(size: int, tmp_path: Path) -> None:
    """What comes without the sender's code is not unpickled, be it short or long."""
    path = tmp_path / "code_was_run"
    problem = "PeerAuthenticationError: An object that came as rank 1's was sent by another"
    raises(WorkerRaisedError, problem, ddp("fork").launch, receive_forged, str(path), "x" * size)
    assert not path.exists()


def codes(strategy: Strategy) -> list[bytes]:
    """Return the codes of the same object in two groups, and twice in one of them."""
    group = dist.new_group([0, 1])
    keys = key_of(), key_of(group), key_of(group)
    found = []
    for key in keys:
        key.begin_collective()
        found.append(key.code_of(b"object"))
    return [code for own in strategy.all_gather_object(found) for code in own]


def test_no_object_can_be_sent_again() -> None:
    """The code of an object is another one in each group, in each collective and of each rank."""
    of_both_ranks = ddp("fork").launch(codes)
    assert len({*of_both_ranks}) == len(of_both_ranks) == 2 * 3
