"""Kubeflow has no server here: a PyTorchJob's command runs on two hosts, with its two pods' variables."""

import json
import re

import pytest

from tests.cluster.conftest import OnBoth
from tests.cluster.digits import BRIEF, EXAMPLES, check_digits
from tests.cluster.hosts import TwoHosts
from tests.unit.environments.variables import Variables, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

JOB = (EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text()


def variables_of(number: int, per_pod: int) -> Variables:
    """Return what the training operator sets in a pod of a PyTorchJob with two of them."""
    main = dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), TwoHosts.names[0])
    return {**pod(number, 2, str(per_pod)), **main}


def test_the_job(on_both: OnBoth) -> None:
    """Each pod's process starts the pod's second rank, and all four train."""
    found = re.search(r"command: (\[.*\])", JOB)
    per_pod = re.search(r'nprocPerNode: "(\d+)"', JOB)
    assert found is not None, JOB
    assert per_pod is not None, JOB
    variables = [variables_of(number, int(per_pod[1])) for number in range(2)]
    results = on_both([*json.loads(found[1]), *BRIEF], variables)
    assert [result.returncode for result in results] == [0, 0], results
    check_digits(results[0].stdout, node_ranks=[0, 0, 1, 1], hosts=TwoHosts.names)
    assert "global_rank" not in results[1].stdout, results
