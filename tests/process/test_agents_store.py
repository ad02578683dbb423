"""Who can reach the store of elastic agents can write a pickle there; none is loaded but a list of nodes."""

import base64
import pickle
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous

from rankwise.launchers.elastic_rendezvous import _CheckedBackend
from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process.impostor import MakesFile

AGENT = """
    import sys
    from rankwise.strategies import DDPElasticStrategy

    if __name__ == "__main__":
        nodes = {"node_range": 2, "endpoint": sys.argv[1], "run_id": "job"}
        DDPElasticStrategy(accelerator="cpu", devices=1, init_timeout=30, **nodes).launch(print)
"""
KEY = "torch.rendezvous.job"
EMPTY = b"Y2FuaW1hZGFt"  # what torch writes before there is a node


def test_what_no_agent_has_written(run_script: ScriptRunner, tmp_path: Path) -> None:
    """The agent ends with an error that says so, and runs no code."""
    port, path = free_port(), tmp_path / "code_was_run"
    agent = run_script.start(AGENT, f"127.0.0.1:{port}")
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    while store.get(KEY) == EMPTY:  # blocks until it is there
        time.sleep(0.01)
    store.set(KEY, base64.b64encode(pickle.dumps(MakesFile(str(path)))).decode())
    result = agent.finish()
    assert not path.exists(), result
    where = f"the agents' store at 127.0.0.1:{port}"
    problem = f"No agent of the job has written the list of nodes in {where}: it names"
    assert f"PeerAuthenticationError: {problem} " in result.stderr, result


def with_fields(**changes: object) -> bytes:
    """Return a pickled list of nodes with changed fields; None takes one away."""
    nodes = dynamic_rendezvous._RendezvousState()
    vars(nodes).update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        delattr(nodes, name)
    return pickle.dumps(nodes)


DAMAGED = [
    *(b"", b"\x80\x04", b"!!!", pickle.dumps({}), pickle.dumps(1)),
    *(b"cbuiltins\neval\n(V1\ntR.", b"ctorch\n_C._distributed_c10d\n.", b"cdatetime\ndatetime.now\n."),
    *(with_fields(participants=[1]), with_fields(round="1"), with_fields(more=1), with_fields(closed=None)),
]


@pytest.mark.parametrize("value", DAMAGED)
def test_what_is_no_list_of_nodes(value: bytes) -> None:
    """Nothing of it reaches torch, be it read or come as the answer to a write."""
    store = dist.HashStore()
    backend = _CheckedBackend(store, "job")
    store.set(KEY, base64.b64encode(value).decode())
    with pytest.raises(RendezvousStateError):
        backend.get_state()
    with pytest.raises(RendezvousStateError):
        backend.set_state(pickle.dumps(dynamic_rendezvous._RendezvousState()), b"another")


def test_a_list_of_nodes() -> None:
    """What agents write is returned as it is."""
    nodes = dynamic_rendezvous._RendezvousState()
    node = dynamic_rendezvous._NodeDesc("host", 1, 0)
    nodes.participants[node] = 0
    nodes.wait_list.add(node)
    nodes.deadline = nodes.last_heartbeats[node] = datetime.now(timezone.utc) + timedelta(seconds=1)
    backend = _CheckedBackend(dist.HashStore(), "job")
    assert backend.get_state() is None
    pickled = pickle.dumps(nodes)
    written = backend.set_state(pickled)
    assert written is not None
    assert written[0] == pickled
    assert written[2]
    assert backend.get_state() == written[:2]
