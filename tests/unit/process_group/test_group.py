"""When process groups end, and where they are created: in a job, by a program itself, under an agent."""

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.environments import TorchElasticEnvironment
from rankwise.errors import ProcessGroupError
from rankwise.gradient_sync import GradientSync
from rankwise.process_group import group
from rankwise.process_group.group import group_joinable, join_process_group, process_group
from rankwise.ranks import RankInfo
from rankwise.stores import rendezvous
from rankwise.stores.rendezvous import RestartInfo
from rankwise.strategies.module_wrapping import WrappedModules
from tests.helpers.own_process import wait_until


def job(work: Callable[[], object]) -> list[weakref.ref[dist.ProcessGroup]]:
    """Call `work` while the default group and another one exist; return weak references to both."""
    ranks = RankInfo()
    with process_group(dist.HashStore(), ranks, "gloo", torch.device("cpu"), timeout=timedelta(seconds=60)):
        dist.new_group([0])
        work()
        return [weakref.ref(group) for group in groups()]


def groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def threads_of_gloo() -> int:
    """Count threads, which set their names after they have started, and are listed for a while."""
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended is listed for a moment more
            count += "gloo" in path.read_text()
    return count


def test_groups_end_with_the_job() -> None:
    """Without other references the groups end with the job, and so do their threads."""
    before = threads_of_gloo()
    assert [group() for group in job(groups)] == [None, None]
    wait_until(lambda: threads_of_gloo() <= before)


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have no names in older versions")
def test_groups_end_with_the_last_reference() -> None:
    """With other references the groups end when these are dropped, in the same thread."""
    gc.collect()  # groups that other tests have left
    before, kept = threads_of_gloo(), list[dist.ProcessGroup]()
    left = job(lambda: kept.extend(groups()))
    assert len(left) == 2
    assert all(group() is not None for group in left)
    wait_until(lambda: threads_of_gloo() > before)
    kept.clear()
    assert [group() for group in left] == [None, None]
    wait_until(lambda: threads_of_gloo() <= before)


def test_a_refused_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's way of creating groups is unknown, the group that it has created does not stay."""

    def refuse() -> None:
        assert dist.is_initialized()
        raise ProcessGroupError("unknown")

    monkeypatch.setattr("rankwise.process_group.group.refuse_unknown_torch", refuse)
    ranks, minute = RankInfo(), timedelta(minutes=1)
    with pytest.raises(ProcessGroupError, match="unknown"):
        join_process_group(dist.HashStore(), ranks, "gloo", torch.device("cpu"), timeout=minute)
    assert not dist.is_initialized()


def test_a_job_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch's functions create and destroy a group, as anywhere."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    with group_joinable():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.is_initialized()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_an_agents_store_has_a_part_for_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that torchrun's agent has started again read nothing of an earlier restart in its store."""
    agents = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setitem(rendezvous._agreed, (("127.0.0.1", agents.port), 0), RestartInfo(3))
    monkeypatch.setattr(rendezvous, "_noted", None)
    monkeypatch.setattr(group, "_group_numbers", iter([7]))
    environment = TorchElasticEnvironment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port)})
    ranks = RankInfo(local_world_size=2, world_size=2)
    group._open_environment_store(environment, ranks, timedelta(minutes=1)).set("key", "value")
    assert agents.check(["start3/join7/key"])


@pytest.mark.full
def test_groups_end_with_the_wrappers_of_a_job() -> None:
    """A wrapper that still exists, as in the traceback of its forward pass, keeps no group."""
    kept: list[nn.Module] = []

    def work() -> None:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        gradients, modules = GradientSync(comm_hook="allreduce"), WrappedModules()
        modules.wrappers.add(wrapped)
        gradients.attach(wrapped, 1)
        gradients.track(wrapped, None, is_new=True)
        kept.append(wrapped)
        wrapped(torch.ones(2)).sum().backward()
        modules.close()
        gradients.detach()

    gc.collect()
    gc.disable()
    try:
        assert [group() for group in job(work)] == [None, None]
    finally:
        gc.enable()
