"""LSF, PALS, Kubeflow and SkyPilot have no server here: their variables, as documented, in real processes."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import OnBoth
from tests.cluster.digits import BRIEF, EXAMPLES, check_digits, check_doctor
from tests.cluster.hosts import TwoHosts
from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.process.helpers import with_tests
from tests.unit.environments.variables import Variables, jsrun, pals, pod, skypilot, train_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

SCRIPT = """
import os
import sys
import torch
from rankwise.environments import NodesEnvironment
from rankwise.strategies import DDPStrategy

class OwnNodes(NodesEnvironment):
    name = "own_nodes"
    variables = {
        "node_rank": "BN_NODE", "num_nodes": "BN_NODES", "main_address": "BN_HEAD", "main_port": "BN_PORT",
    }

def train(strategy):
    torch.manual_seed(strategy.global_rank)  # DDP gives all of them those of rank 0
    model = strategy.setup_module(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        strategy.backward(model(torch.full((2, 1), strategy.global_rank + 1.0)).square().mean())
        strategy.optimizer_step(optimizer)
    weights = strategy.all_gather(model.module.weight.detach().flatten()).flatten().tolist()
    line = f"{strategy.environment.name} {strategy.ranks} {len(set(weights))} weights\\n"
    sys.stdout.write(line)  # in one piece: the ranks of a pod share this stdout
    sys.stdout.flush()

if __name__ == "__main__":
    own = OwnNodes() if "BN_NODE" in os.environ else None
    devices = int(sys.argv[1]) if sys.argv[1:] else "auto"
    strategy = DDPStrategy(accelerator="cpu", devices=devices, cluster_environment=own, start_method="fork")
    strategy.launch(train)
"""


def run_all(run_script: ScriptRunner, sets: Sequence[Variables], *arguments: str) -> list[ScriptResult]:
    command = [sys.executable, str(run_script.write(SCRIPT)), *arguments]
    running = [run_script.start_command(command, env={**with_tests(), **own}) for own in sets]
    results = [each.finish(timeout=110) for each in running]
    assert [result.returncode for result in results] == [0] * len(sets), results
    return results


def test_lsf(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Two tasks of one jsrun train as one job, at a port that comes from the job's id."""
    hosts = tmp_path / "rankfile"
    hosts.write_text("batch1\nnode1\nnode1\n")
    sets = [{**jsrun(rank), "LSB_DJOB_RANKFILE": str(hosts)} for rank in (0, 1)]
    for rank, result in enumerate(run_all(run_script, sets)):
        place = f"RankInfo(global_rank {rank} of 2, local_rank {rank} of 2, node 0 of 1)"
        assert f"lsf {place} 1 weights" in result.stdout, result


@pytest.mark.parametrize("name", ["lsf", pytest.param("pals", marks=pytest.mark.soak)])
def test_two_nodes(name: str, on_both: OnBoth, hosts: TwoHosts, tmp_path: Path) -> None:
    """A task on each of two nodes: they connect at the first node of the job's file."""
    nodes = tmp_path / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in ([] if name == "pals" else ["batch1"]) + [*hosts.names]))
    sets = {
        "lsf": [{**jsrun(rank, 2, 1), "LSB_DJOB_RANKFILE": str(nodes)} for rank in (0, 1)],
        "pals": [{**pals(rank, 2, 1), "PBS_NODEFILE": str(nodes)} for rank in (0, 1)],
    }[name]
    doctor, other = on_both(["python", "-m", "rankwise", "doctor"], sets)
    assert [doctor.returncode, other.returncode] == [0, 0], (doctor, other)
    check_doctor(doctor.stdout, name, world_size=2)


def nodes_of(name: str, address: str, port: str) -> list[Variables]:
    """Return the variables of two nodes of one process each, whose rank 0 is at an address."""
    main = {"MASTER_ADDR": address, "MASTER_PORT": port}
    pet = {f"PET_{variable}": value for variable, value in main.items()}
    sky = {"SKYPILOT_NODE_IPS": address, "MASTER_PORT": port}
    own = {"BN_NODES": "2", "BN_HEAD": address, "BN_PORT": port}
    return {
        "kubeflow": [{**pod(rank, 2, "2"), **main} for rank in (0, 1)],
        "trainjob": [{**train_job(rank, 2, "2"), **pet} for rank in (0, 1)],
        "skypilot": [{**skypilot(rank), **sky} for rank in (0, 1)],
        "own_nodes": [{"BN_NODE": str(rank), **own} for rank in (0, 1)],
    }[name]


@pytest.mark.parametrize(
    ("name", "devices"), [("kubeflow", []), ("trainjob", []), ("skypilot", ["2"]), ("own_nodes", ["2"])]
)
def test_nodes_of_two_processes(name: str, devices: list[str], run_script: ScriptRunner) -> None:
    """Two nodes of one process each train as four ranks, of which the strategy starts the others."""
    nodes = nodes_of(name, "127.0.0.1", str(free_port()))
    for node, result in enumerate(run_all(run_script, nodes, *devices)):
        for rank in (2 * node, 2 * node + 1):
            place = f"RankInfo(global_rank {rank} of 4, local_rank {rank % 2} of 2, node {node} of 2)"
            assert f"{name} {place} 1 weights" in result.stdout, result


JOB = (EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text()


@pytest.mark.soak
def test_the_job(on_both: OnBoth) -> None:
    """A PyTorchJob's command in its two pods: each starts the pod's second rank, and all four train."""
    [command] = re.findall(r"command: (\[.*\])", JOB)
    [per_pod] = re.findall(r'nprocPerNode: "(\d+)"', JOB)
    main = dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), TwoHosts.names[0])
    variables = [{**pod(number, 2, per_pod), **main} for number in range(2)]
    results = on_both([*json.loads(command), *BRIEF], variables)
    assert [result.returncode for result in results] == [0, 0], results
    check_digits(results[0].stdout, node_ranks=[0, 0, 1, 1], hosts=TwoHosts.names)
    assert "global_rank" not in results[1].stdout, results
