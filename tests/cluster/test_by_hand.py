"""Two hosts started by hand: one process on each, which starts the second rank there."""

import sys
import time
from collections.abc import Mapping

import pytest

from tests.cluster.hosts import TwoHosts
from tests.helpers.scripts import WITHOUT_COVERAGE, RunningScript, ScriptResult, ScriptRunner
from tests.process.helpers import with_tests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOAK = pytest.mark.soak
METHODS = ("fork", "popen")
TIMEOUT_S = 8
SCRIPT = f"""
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from rankwise.strategies import DDPStrategy
from tests.process.training_tasks import Regression, dataset, quiet_trainer

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # a line in one piece: two ranks share this stdout
    sys.stdout.flush()

def fail():
    raise ValueError("boom on purpose")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def sleep():
    time.sleep(60)

FAULTS = {{  # by rank, in the sixth step
    "raise": {{3: fail}}, "kill": {{3: kill}}, "hang": {{3: sleep}},
    "apart": {{0: fail, 1: sleep, 2: sleep, 3: sleep}},
}}

def work(strategy, what):
    own = torch.ones(2) * strategy.global_rank
    total = strategy.all_reduce(own, reduce_op="sum").tolist()
    say(strategy.ranks, os.environ["GLOO_SOCKET_IFNAME"], total)
    if what == "late" and strategy.global_rank == 3:
        time.sleep(1)
        fail()
    for step in range(0 if what in ("end", "late") else 100_000):
        if step == 5:
            FAULTS.get(what, {{}}).get(strategy.global_rank, list)()
        strategy.all_reduce(own)
        time.sleep(0.05)
        if step == 5:
            say("stepping")
    return total

class FailsEarly(DDPStrategy):
    def setup_environment(self):
        if self.global_rank == 3:
            {{"raise early": fail, "kill early": kill}}.get(sys.argv[2], list)()
            dist.init_process_group = lambda *_, **__: kill()
        super().setup_environment()

class Stepping(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            say("stepping")
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

def fit(strategy):
    trainer = quiet_trainer(strategy, "auto", num_nodes="auto", max_epochs=1)
    trainer.fit(Stepping(), DataLoader(dataset(100_000), batch_size=1))

if __name__ == "__main__":
    method, what = sys.argv[1:]
    options = dict(accelerator="cpu", devices=2, num_nodes=2, stall_warning=2)
    options["timeout"] = 50 if what == "early, when all have met" else {TIMEOUT_S}
    strategy = (FailsEarly if "early" in what else DDPStrategy)(start_method=method, **options)
    try:
        if what == "fit":
            fit(strategy)
        else:
            say(strategy.launch(work, what), strategy.launch(work, "end"))
    finally:
        say("left at", time.monotonic())  # the interpreter takes its own time to leave
"""


PREPARING = """
import sys
from rankwise import DataModule
from rankwise.strategies import DDPStrategy
from tests.process.training_tasks import Regression, loader, quiet_trainer

class Data(DataModule):
    def prepare_data(self):
        sys.stdout.write(f"per_node={self.prepare_data_per_node} on {self.trainer.global_rank}\\n")
        sys.stdout.flush()

    def train_dataloader(self):
        return loader(16, 2)

for per_node in (True, False):
    data = Data()
    data.prepare_data_per_node = per_node
    strategy = DDPStrategy(start_method="fork", accelerator="cpu", devices=2, num_nodes=2)
    quiet_trainer(strategy, "auto", num_nodes="auto", max_epochs=1).fit(Regression(), datamodule=data)
"""


Variables = Mapping[str, str | None]


def start(
    hosts: TwoHosts,
    runner: ScriptRunner,
    *arguments: str,
    more: Variables | None = None,
    script: str = SCRIPT,
) -> list[RunningScript]:
    return [
        runner.start_command(
            [sys.executable, str(runner.write(script)), *arguments],
            place=hosts.place(name),
            siblings=4 * (arguments[:1] == ("popen",)),  # two for each launch
            env={**with_tests(more), "NODE_RANK": str(node), "MASTER_ADDR": "hosta", "MASTER_PORT": "29500"},
        )
        for node, name in enumerate(hosts.names)
    ]


def run(
    hosts: TwoHosts, runner: ScriptRunner, *arguments: str, code: int = 0, said: tuple[str, ...] = ()
) -> list[ScriptResult]:
    """Run the script on both hosts; each ends with `code`, and has written each text to stderr."""
    results = [each.finish(timeout=110) for each in start(hosts, runner, *arguments)]
    for result in results:
        assert result.returncode == code, results
        for text in said:
            assert text in result.stderr, results
    return results


BOOM = "raised ValueError: boom on purpose"
OF_ZERO = ("Worker global_rank=0 (local_rank=0, node_rank=0, host 'hosta', pid", BOOM)
OF_THREE = "Worker global_rank=3 (local_rank=1, node_rank=1"


@pytest.mark.parametrize("method", ["popen", pytest.param("fork", marks=SOAK)])
def test_each_node_starts_its_own(hosts: TwoHosts, run_script: ScriptRunner, method: str) -> None:
    """Four ranks on two nodes connect at node 0's address, and again for a second job."""
    results = run(hosts, run_script, method, "end")
    for node, result in enumerate(results):
        for rank in (2 * node, 2 * node + 1):
            place = f"global_rank {rank} of 4, local_rank {rank % 2} of 2, node {node} of 2"
            assert result.stdout.count(f"{place}) {hosts.interface} [6.0") == 2, results


def test_where_data_are_prepared(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """By the first rank of each node; without `prepare_data_per_node` by global rank 0 alone."""
    results = [each.finish(timeout=110) for each in start(hosts, run_script, script=PREPARING)]
    assert [result.returncode for result in results] == [0, 0], results
    said = [[line for line in result.stdout.splitlines() if "per_node" in line] for result in results]
    assert said == [["per_node=True on 0", "per_node=False on 0"], ["per_node=True on 2"]], results


def test_a_host_that_is_loopback_to_itself(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """Where node 0's own name resolves to 127.0.1.1, it listens at the address that node 1 resolves."""
    with hosts.loopback_to_itself("hosta"):
        results = run(hosts, run_script, "fork", "end")
    for node, result in enumerate(results):
        assert result.stdout.count(f"node {node} of 2) {hosts.interface} [6.0") == 4, results


KILLED = (f"{OF_THREE}, host 'hostb', pid", "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("method", "what", "code", "said"),
    [
        ("fork", "raise", 1, (OF_THREE, BOOM)),
        pytest.param("fork", "late", 1, (OF_THREE, BOOM), marks=SOAK),  # when the other node has finished
        ("popen", "kill", 137, KILLED),
        pytest.param("fork", "kill", 137, KILLED, marks=SOAK),
        *(pytest.param(method, "apart", 1, OF_ZERO, marks=SOAK) for method in METHODS),
        pytest.param("popen", "kill early", 137, KILLED[:1], marks=SOAK),
        ("fork", "raise early", 1, KILLED[:1]),
        *(
            pytest.param(method, "early, when all have met", 137, KILLED[:1], marks=SOAK)
            for method in METHODS
        ),
    ],
)
def test_a_failure_is_named_on_both_nodes(
    method: str, what: str, code: int, said: tuple[str, ...], hosts: TwoHosts, run_script: ScriptRunner
) -> None:
    """A failure of a rank ends both nodes and is named on both, at work, in no collective, or early.

    With rank 0 the store fails, too. A rank that fails before there is a group does not keep the other node
    until `init_timeout`.
    """
    results = run(hosts, run_script, method, what, code=code, said=said)
    assert not any("the same on" in result.stderr for result in results), results
    left = [float(result.stdout.rpartition("left at ")[2]) for result in results]
    assert abs(left[0] - left[1]) < 30, results  # they do not sleep until the end


def test_who_is_late_is_named_on_both_nodes(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """A rank that hangs on one node is named on the other too, with its host and what it does."""
    late = "global_rank 3 (node 1, host 'hostb', pid"
    said = ("WorkerTimedOutError", "waited too long for global_rank=3", late, ") was last in running, ")
    results = run(hosts, run_script, "fork", "hang", code=1, said=said)
    assert f"rankwise: {late}" in results[0].stderr, results[0].stderr


@pytest.mark.parametrize(("method", "what"), [("popen", "fit"), pytest.param("fork", "train", marks=SOAK)])
def test_a_cut_cable_ends_both_nodes(
    method: str, what: str, hosts: TwoHosts, run_script: ScriptRunner
) -> None:
    """Both end soon after the timeout, and each names the ranks that it cannot reach.

    In a launched function as in a fit, with its threads and under the strategy's default start method.
    """
    running = start(hosts, run_script, method, what, more=WITHOUT_COVERAGE)
    try:
        for each in running:
            each.wait_for("stepping", count=2, timeout=100)
        hosts.cut()
        began = time.monotonic()
        for each in running:
            each.popen.wait(60)
        elapsed = time.monotonic() - began
        results = [each.finish() for each in running]
    finally:
        hosts.join()
    for other, result in zip((1, 0), results, strict=True):
        assert result.returncode == 1, results
        assert "NodesLostError" in result.stderr, results
        for rank in (2 * other, 2 * other + 1):
            assert f"global_rank {rank} (node {other}, host '{hosts.names[other]}'" in result.stderr, results
    left = [float(result.stdout.rpartition("left at ")[2]) - began for result in results]
    assert max(left) >= TIMEOUT_S - 1, (left, results)  # they had been at work until then
    assert max(left) < 2 * TIMEOUT_S - 1, (left, results)
    assert elapsed < TIMEOUT_S + 20, (left, elapsed, results)  # an interpreter takes its time to leave
