"""Kubeflow has no server here: a PyTorchJob's command runs on two hosts, with its two pods' variables."""

from __future__ import annotations

import json
import re

import pytest

from tests.cluster.conftest import OnBoth
from tests.cluster.digits import BRIEF, EXAMPLES, check_digits
from tests.cluster.hosts import TwoHosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

JOB = (EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text()


def variables_of(pod: int, per_pod: int) -> dict[str, str]:
    """Return what the training operator sets in a pod of a PyTorchJob with two of them."""
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": TwoHosts.names[0],
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(2 * per_pod),
        "RANK": str(pod),
        "PYTHONUNBUFFERED": "1",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(per_pod),
        "PET_NODE_RANK": str(pod),
        "PET_MASTER_ADDR": TwoHosts.names[0],
        "PET_MASTER_PORT": "23456",
    }


def test_the_job(on_both: OnBoth) -> None:
    """Each pod's one process starts the pod's other rank, and all four train."""
    found = re.search(r"command: (\[.*\])", JOB)
    per_pod = re.search(r'nprocPerNode: "(\d+)"', JOB)
    assert found is not None, JOB
    assert per_pod is not None, JOB
    variables = [variables_of(pod, int(per_pod[1])) for pod in range(2)]
    results = on_both([*json.loads(found[1]), *BRIEF], variables)
    assert [result.returncode for result in results] == [0, 0], results
    check_digits(results[0].stdout, node_ranks=[0, 0, 1, 1], hosts=TwoHosts.names)
    assert "global_rank" not in results[1].stdout, results
