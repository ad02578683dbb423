"""`launch` from one process returns values, gives ranks their environment, and changes nothing else."""

import gc
import inspect
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group as early_destroy
from torch.distributed import init_process_group as early_init

from rankwise.environments import PlainEnvironment
from rankwise.errors import LifecycleError, WorkerRaisedError
from rankwise.launchers.supervisor import Supervisor
from rankwise.process_group import init_process_group
from rankwise.ranks import rank_zero_only
from rankwise.strategies import DDPForkStrategy, DDPSpawnStrategy, DDPStrategy, Strategy
from tests.helpers.parameters import first
from tests.helpers.raising import raises
from tests.process.helpers import RENDEZVOUS, WORLD, ddp

MEGABYTE = 1 << 20
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)

Facts = dict[str, Any]


@rank_zero_only
def only_on_rank_zero() -> str:
    return "ran"


def all_facts(strategy: Strategy, number: int) -> Facts:
    total = strategy.all_reduce(torch.tensor(float(strategy.global_rank + 1)), reduce_op="sum")
    return {
        "total": float(total),
        "argument": number,
        "ranks": strategy.ranks,
        "pid": os.getpid(),
        "rank_zero_only": only_on_rank_zero(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "backend": dist.get_backend(),
        "group": (dist.get_rank(), dist.get_world_size()),
        "device": strategy.root_device.type,
        "given": os.environ.get("RANKWISE_TEST_GIVEN"),
        "path": list(sys.path),
    }


def _caller() -> Facts:
    """Return what tests/conftest.py does not compare after each test."""
    return {
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakeup_fd": _wakeup_fd(),
        "alarm": signal.getsignal(signal.SIGALRM),
        "torch_threads": torch.get_num_threads(),
        "gc": gc.isenabled(),
        "gc_frozen": gc.get_freeze_count(),
    }


def _wakeup_fd() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


@pytest.fixture(params=["fork", "forkserver"])
def start_method(request: pytest.FixtureRequest) -> str:
    """A fast start method; spawn uses the code of forkserver, and is in test_everything_at_once."""
    return str(request.param)


@pytest.mark.quick
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
# The others are in test_everything_at_once, too.
@pytest.mark.parametrize("method", first(1, ["fork", "spawn", "forkserver"]))
def test_every_ranks_value_is_in_results(
    method: str, rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`launch` returns rank 0's value, twice; ranks have a process, a group and variables as from torchrun.

    They see what the caller can import, and its variables, even those of a warm forkserver. `rank_zero_only`
    follows the rank. In the caller nothing changes; there the strategy is bound, and stands for rank 0.
    """
    gc.unfreeze()  # importing the forkserver's preload in this process has frozen what was there
    monkeypatch.setenv("RANKWISE_TEST_GIVEN", f"{method} {rendezvous}")
    before, strategy = _caller(), ddp(method, rendezvous)
    assert strategy.launch(all_facts, 7)["ranks"].global_rank == 0
    first = strategy.results
    assert _caller() == before
    assert (strategy.is_bound, strategy.global_rank, strategy.world_size) == (True, 0, WORLD)
    assert strategy.runs_in_caller is False

    pids = {facts["pid"] for facts in first.values()}
    assert len({os.getpid(), *pids}) == WORLD + 1
    assert list(first) == list(range(WORLD))
    for rank, facts in first.items():
        assert facts["ranks"].global_rank == rank
        assert (facts["total"], facts["backend"], facts["group"]) == (3.0, "gloo", (rank, WORLD))
        assert facts["given"] == f"{method} {rendezvous}"
        assert set(sys.path) <= set(facts["path"])
        assert facts["rank_zero_only"] == ("ran" if rank == 0 else None)
        seen, is_tcp = facts["variables"], rendezvous == "tcp"
        assert seen.pop("MASTER_ADDR", None) == ("127.0.0.1" if is_tcp else None)
        assert (seen.pop("MASTER_PORT", None) is not None) is is_tcp
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        assert seen == {**own, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}

    again = strategy.launch(all_facts, number=8)
    assert (again["total"], again["argument"]) == (3.0, 8)
    assert again["pid"] not in pids


def test_ranks_that_end_before_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have done their part: on a busy machine the launching process may come to it later."""

    def begin_late(supervisor: Supervisor, until_exit: bool) -> None:
        while not supervisor.all_ended():
            time.sleep(0.01)
        begin(supervisor, until_exit)

    begin = Supervisor.begin_job
    monkeypatch.setattr(Supervisor, "begin_job", begin_late)
    assert ddp("fork", "tcp").launch(lambda _: os.environ["RANK"], init_process_group=False) == "0"
    with pytest.raises(WorkerRaisedError, match="ZeroDivisionError"):
        ddp("fork", "tcp").launch(lambda _: 1 // 0, init_process_group=False)


def late(strategy: Strategy) -> None:
    time.sleep(0.3 * (strategy.global_rank == 0))
    strategy.broadcast(1)


@pytest.mark.parametrize("jobs", [8, pytest.param(30, marks=pytest.mark.soak)])
def test_a_job_without_a_collective(jobs: int) -> None:
    """A rank that returns at once does not fail one that is still connecting."""
    for _ in range(jobs):
        ddp("fork", devices=4).launch(lambda _: None)


def test_a_late_rank_is_waited_for(start_method: str) -> None:
    """A rank whose peers have finished already can still use the group."""
    ddp(start_method).launch(late)


def return_unpicklable(strategy: Strategy) -> Any:
    return lambda: None


def test_a_value_that_cannot_travel_is_an_error(start_method: str) -> None:
    """A value that cannot be pickled ends the job with one exception with that reason."""
    raises(RuntimeError, "pickle", ddp(start_method).launch, return_unpicklable)


# ---------------------------------------------------------------------- arguments


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(5))


Special = dict[str, torch.Tensor]


def special_tensors() -> Special:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "transposed": base.t(),
        "slice": base[1:, ::2],
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 4),
        "expanded": torch.tensor([7.0]).expand(3),
    }


# ---------------------------------------------------------------------- the user's own group


def own_group(strategy: Strategy) -> tuple[bool, float]:
    was_initialized = dist.is_initialized()
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return was_initialized, float(total)


@pytest.mark.quick
@pytest.mark.parametrize("rendezvous", ["auto", "tcp"])
def test_the_user_makes_the_group(start_method: str, rendezvous: str) -> None:
    """With `init_process_group=False` there is no group, and the user's own `env://` works."""
    strategy = ddp(start_method, rendezvous)
    strategy.launch(own_group, init_process_group=False)
    assert strategy.results == {0: (False, 3.0), 1: (False, 3.0)}


def test_the_user_makes_the_group_of_a_later_launch() -> None:
    """The same works when the strategy, left to choose its rendezvous, was bound or launched before."""
    strategy = ddp("fork", "auto")
    strategy.launch(late)
    assert strategy.launch(own_group, init_process_group=False) == (False, 3.0)


def as_torchrun_starts(strategy: Strategy, **options: Any) -> list[float]:
    totals = []
    for _ in range(2):
        early_init("gloo", **options)
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        totals.append(float(total))
        early_destroy()
    strategy.barrier()  # the job's group is still there
    return totals


@pytest.mark.quick
def test_a_program_of_torchruns_joins(start_method: str) -> None:
    """A program that creates and destroys its own group joins the job's, and torch's functions come back."""
    strategy = ddp(start_method)
    code = inspect.unwrap(early_init).__code__
    agreeing: list[dict[str, Any]] = [{}, {"rank": -1, "world_size": 2, "init_method": "env://"}]
    for options in agreeing:
        strategy.launch(as_torchrun_starts, **options)
        assert strategy.results == {0: [3.0, 3.0], 1: [3.0, 3.0]}
    assert inspect.unwrap(early_init).__code__ is code
    assert "init_method" in inspect.signature(dist.init_process_group).parameters


def test_the_main_process_joins_and_gets_torchs_functions_back() -> None:
    """So it is where the main process is rank 0; rankwise's own function joins, too."""
    strategy = DDPStrategy(start_method="fork", devices=1, accelerator="cpu")
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment = PlainEnvironment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address})

    def run(strategy: Strategy) -> bool:
        init_process_group(environment)
        dist.destroy_process_group()
        early_init(backend="gloo")
        dist.destroy_process_group()
        early_destroy()  # one more than were joined: the program ends the job's group
        return dist.is_initialized()

    assert strategy.launch(run) is False
    assert not dist.is_initialized()
    raises(ValueError, "environment variable RANK expected", early_init, "gloo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 3}, r"init_process_group\(world_size=3\) contradicts the process group of the job"),
        ({"rank": 5, "world_size": 2}, r"init_process_group\(rank=5\) contradicts"),
        ({"backend": "mpi"}, r"init_process_group\(backend='mpi'\) contradicts .* back end 'gloo'"),
    ],
)
def test_a_program_that_wants_another_group(options: dict[str, Any], message: str) -> None:
    """It is an error that says how to leave the group to the program."""
    with pytest.raises(RuntimeError, match=message) as caught:
        ddp("fork").launch(lambda _: early_init(**options))
    assert "strategy.launch(function, init_process_group=False)" in str(caught.value)


def test_what_an_existing_group_cannot_take() -> None:
    """A timeout of the program's is not used, and it is told."""

    def run(_: Strategy) -> None:
        with pytest.warns(match=r"which cannot take timeout\. Pass timeout= to the strategy"):
            early_init("gloo", timeout=timedelta(seconds=3))

    ddp("fork").launch(run)


def launch_within(strategy: Strategy) -> Any:
    try:
        return strategy.launch(late)
    except LifecycleError as error:
        return str(error)


def test_what_cannot_be_pickled_is_welcome_under_fork(capfd: pytest.CaptureFixture[str]) -> None:
    """Closures and locks work. What ranks print is written, although a fork skips Python's exit."""
    lock, number = threading.Lock(), 41

    def run(strategy: Strategy, lock: Any) -> int:
        print(f"rank {strategy.global_rank} was here")
        return lock.acquire(timeout=1) and number + 2

    assert ddp("fork").launch(run, lock) == 43
    out = capfd.readouterr().out
    assert [out.count(f"rank {rank} was here") for rank in (0, 1)] == [1, 1]


@pytest.mark.quick
def test_subclasses_are_start_methods() -> None:
    """`DDPSpawnStrategy` and `DDPForkStrategy` are `DDPStrategy` with their start method."""
    strategies: list[DDPStrategy] = [DDPSpawnStrategy(), DDPForkStrategy()]
    assert [each.start_method for each in strategies] == ["spawn", "fork"]


@pytest.mark.parametrize(("devices", "total"), [(1, 1.0), (5, 15.0)])
def test_other_numbers_of_processes_are_a_job_too(devices: int, total: float) -> None:
    """One worker has a group of one; more processes than cores meet and reduce."""
    strategy = ddp("fork", devices=devices)
    facts = strategy.launch(all_facts, 1)
    assert (facts["total"], facts["group"]) == (total, (0, devices))
    assert sorted(strategy.results) == list(range(devices))


def everything_at_once(strategy: Strategy, tensors: Special, module: Tied) -> Facts:
    with torch.no_grad():
        module.first.weight.fill_(strategy.global_rank + 1.0)
    return {
        "tensors": tensors,
        "is_tied": module.second.weight is module.first.weight,
        "big": torch.full((50 * MEGABYTE // 4,), float(strategy.global_rank)),
        "raw": bytes([strategy.global_rank]) * (50 * MEGABYTE),
        "state": module.state_dict(),
        "own_group": own_group(strategy),
        "nested": launch_within(strategy),
    }


@pytest.mark.parametrize("method", first(1, ["fork", "forkserver", "spawn"]))
def test_everything_at_once(method: str) -> None:
    """Big values, tensors, state dicts, the user's own group; arguments are copies, no launch is nested."""
    strategy, module = ddp(method, "tcp"), Tied()
    before = module.first.weight.detach().clone()
    strategy.launch(everything_at_once, special_tensors(), module, init_process_group=False)
    assert torch.equal(module.first.weight, before)
    assert not module.first.weight.is_shared()
    for rank, facts in strategy.results.items():
        assert all(map(torch.equal, facts["tensors"].values(), special_tensors().values()))
        assert list(facts["tensors"]) == list(special_tensors())
        assert facts["is_tied"] is True
        assert facts["big"].shape == (50 * MEGABYTE // 4,)
        assert bool((facts["big"] == rank).all())
        assert facts["raw"] == bytes([rank]) * (50 * MEGABYTE)
        with torch.no_grad():
            module.first.weight.fill_(rank + 1.0)  # as on the rank
        state, expected_state = facts["state"], module.state_dict()
        assert list(state) == list(expected_state)
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())
        assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()
        assert facts["own_group"] == (False, 3.0)
        assert "launch() was called in state 'in a job'" in facts["nested"]
    strategy.results[0]["big"].add_(5)
    assert [float(facts["big"][-1]) for facts in strategy.results.values()] == [5.0, 1.0]
