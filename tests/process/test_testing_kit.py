"""`rankwise.testing`: what the contract suites find, and faults that are injected."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import (
    ConfigurationError,
    ContractError,
    InvalidArgumentError,
    InvalidTypeError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
)
from rankwise.launchers.context import CallerLauncher, RankRun, WorkerContext
from rankwise.ranks import RankInfo
from rankwise.strategies import DDPForkStrategy, SingleDeviceStrategy, Strategy
from rankwise.testing import (
    Fault,
    check_checkpoint_io,
    check_launcher,
    check_strategy,
    inject_faults,
    run_distributed,
)
from rankwise.testing.jobs import _fail_on, run_on
from tests.helpers.bucket import Bucket
from tests.helpers.parameters import first
from tests.helpers.raising import raises
from tests.process.helpers import ddp
from tests.process.resume_tasks import ThroughTorch
from tests.process.training_tasks import Regression, loader, quiet_trainer

# ---------------------------------------------------------------------- strategies


class SummedByDefault(DDPForkStrategy):
    """Does not average what it reduces by default."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "sum") -> Any:
        return super().all_reduce(tensor, group, reduce_op)


class ApartAtTheEnd(DDPForkStrategy):
    """Lets its ranks end with different weights."""

    trained: Any = None

    def setup_module(self, module: nn.Module) -> nn.Module:
        if hasattr(module, "second"):
            self.trained = module
        return super().setup_module(module)

    @torch.no_grad()
    def sync_models(self) -> None:
        super().sync_models()
        self.trained.second.bias += self.global_rank


class ClippedTooEarly(DDPForkStrategy):
    """Averages gradients in the optimizer step only, after they have been clipped."""

    def configure_ddp(self, module: nn.Module, device_ids: Any) -> Any:
        wrapped = super().configure_ddp(module, device_ids)
        wrapped.require_backward_grad_sync = False
        return wrapped

    def optimizer_step(self, optimizer: Any, closure: Any = None, **options: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = self.all_reduce(parameter.grad)
        return super().optimizer_step(optimizer, closure, **options)


class KeysOfTheWrapper(DDPForkStrategy):
    """Returns the wrapper's state in place of the module's."""

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict()


class WrapsFrozen(DDPForkStrategy):
    """Wraps modules without trainable parameters, too."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        ready = super().setup_module(module)
        return nn.Sequential(module) if ready is module else ready

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        return module[0] if isinstance(module, nn.Sequential) else super().unwrap_module(module)


# ---------------------------------------------------------------------- launchers


class SharedMemory(DDPForkStrategy):
    """Starts its ranks so that tensors of the caller are in shared memory."""

    def launch(self, function: Any, *args: Any, **options: Any) -> Any:
        return super().launch(function, *(each.share_memory_() for each in args), **options)


class Launcherless(DDPForkStrategy):
    """Has a launcher that runs everything in the caller."""

    def create_launcher(self, placement: Any) -> Any:
        return Everyone(placement.ranks)


class Everyone(CallerLauncher):
    """Is rank 0, and claims to be the others."""

    runs_in_caller = False
    has_other_ranks = False

    def __init__(self, ranks: RankInfo) -> None:
        self.ranks = ranks

    @contextmanager
    def running(self, rendezvous: str) -> Iterator[RankRun]:
        yield (run := RankRun(WorkerContext(RankInfo(0, 0, 0, 1, 1, 1), {"RANK": "0"})))
        run.values = dict.fromkeys(range(2), run.value)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_launchers(start_method: str) -> None:
    """Launchers of rankwise keep the contract."""
    check_launcher(ddp(start_method))


def test_one_rank_fails() -> None:
    """The rank that is to fail does; if it did not, the others would report that."""
    raises(AssertionError, "returned without a rank", run_on, SingleDeviceStrategy(), _fail_on, 1)


@pytest.mark.parametrize(
    ("check", "kind", "problems"),
    first(
        5,
        [
            (check_strategy, WrapsFrozen, ["it is wrapped"]),
            (check_strategy, KeysOfTheWrapper, ["get_module_state_dict has the module's own keys"]),
            (check_strategy, SummedByDefault, ["all_reduce averages by default", "[1, 6] instead of"]),
            (check_strategy, ClippedTooEarly, ["1 microbatches in a step and gradients clipped to 0.05"]),
            (check_launcher, Launcherless, ["runs once as each", "process of its own", "is a WorkerError"]),
            (check_strategy, ApartAtTheEnd, ["1 microbatches in a step ends with the same weights on every"]),
            (check_launcher, SharedMemory, ["each rank has memory of its own"]),
        ],
    ),
)
def test_broken_contracts(check: Any, kind: type[DDPForkStrategy], problems: list[str]) -> None:
    """A rule that a strategy or a launcher breaks is a line of the error."""
    with pytest.raises(ContractError) as caught:
        check(kind(accelerator="cpu", devices=2))
    assert [problem for problem in problems if problem not in str(caught.value)] == []
    assert isinstance(caught.value, AssertionError)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", [TorchCheckpointIO, AsyncCheckpointIO, Bucket])
def test_checkpoints(kind: Any, tmp_path: Path) -> None:
    """Both plug-ins of rankwise keep the contract; checkpoints may be at addresses with a scheme."""
    arguments = (Bucket(tmp_path), "bucket://run") if kind is Bucket else (kind(), tmp_path)
    check_checkpoint_io(*arguments)


class Forgetful(ThroughTorch):
    """Removes nothing, and reads nothing as an empty checkpoint."""

    def load_checkpoint(self, path: Any, map_location: Any = "cpu") -> dict[str, Any]:
        return super().load_checkpoint(path, map_location) if Path(path).exists() else {}

    def remove_checkpoint(self, path: Any) -> None:
        pass


def test_a_forgetful_checkpoint_io(tmp_path: Path) -> None:
    """Each rule that is broken is a line."""
    with pytest.raises(ContractError, match="breaks 2 rules") as caught:
        check_checkpoint_io(Forgetful(), tmp_path)
    line = "a checkpoint that is missing is a CheckpointError: there is no CheckpointError"
    assert line in str(caught.value)


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(Fault("raise", 1, step=2, phase="forward"), WorkerRaisedError, marks=pytest.mark.quick),
        (Fault("kill", 0, phase="backward"), WorkerKilledError),
        (Fault("exit", 1, step=1), WorkerExitedError),
        (Fault("stop", 1, phase="optimizer"), WorkerTimedOutError),
        (Fault("raise", 0, phase="connecting"), WorkerRaisedError),
        (Fault("raise", 1, phase="teardown"), WorkerRaisedError),
    ],
    ids=lambda value: f"{value.action}-{value.phase}" if isinstance(value, Fault) else "",
)
def test_faults(fault: Fault, error: type[Exception]) -> None:
    """The fault happens on its rank, at its step or phase."""
    with inject_faults(fault) as injection, pytest.raises(error, match=f"global_rank={fault.rank}"):
        quiet_trainer(ddp("fork", timeout=3.0), 2, max_steps=4).fit(Regression(), loader(16, 2))
    assert time.monotonic() - (injection.happened_s(fault) or 0) < 30


def steps(strategy: Strategy) -> list[float]:
    """Train by hand; return how long each step took, the wait for the other rank included."""
    module = strategy.setup_module(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    taken = []
    for _ in range(3):
        began_s = time.monotonic()
        loss: Tensor = module(torch.ones(1, 1)).sum()
        strategy.backward(loss)
        strategy.optimizer_step(optimizer)
        taken.append(time.monotonic() - began_s)
    return taken


DELAY = Fault("delay", 1, step=1, phase="backward", delay_s=0.7)


def test_a_delay_in_a_loop_by_hand() -> None:
    """A delay of one rank, at a step of a loop without a Trainer, keeps the other one waiting."""
    with inject_faults(DELAY):
        taken = run_distributed(steps)
    assert [[number for number, seconds in enumerate(rank) if seconds > 0.6] for rank in taken] == [[1], [1]]


def delayed(strategy: Strategy) -> list[float]:
    with inject_faults(DELAY):
        return steps(strategy)


def test_a_fault_in_the_function() -> None:
    """Where ranks are no forks, the function injects the faults; those of other ranks are none."""
    taken = run_distributed(delayed, start_method="forkserver")
    assert max(taken[1]) > 0.6


@pytest.mark.parametrize(
    "fault", [Fault("raise", 1, step=99), Fault("kill", 2, step=0), Fault("exit", 0, phase="bakward")]
)
def test_faults_that_do_not_happen(fault: Fault) -> None:
    """A fault that no rank came to is an error: the test has tested nothing."""
    with pytest.raises(ConfigurationError, match="has not happened"), inject_faults(fault):
        run_distributed(steps)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (partial(Fault, "crash", 0, step=0), InvalidArgumentError),
        (partial(Fault, "kill", -1, step=0), InvalidArgumentError),
        (partial(Fault, "kill", "0", step=0), InvalidTypeError),  # type: ignore[arg-type]  # wrong on purpose
        (partial(Fault, "kill", 0), InvalidArgumentError),
        (lambda: inject_faults("kill").__enter__(), InvalidTypeError),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: check_strategy(DDPForkStrategy), InvalidTypeError),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: check_checkpoint_io(TorchCheckpointIO, "x"), InvalidTypeError),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: check_launcher(os.getpid), InvalidTypeError),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception]) -> None:
    """What cannot be is refused at once."""
    with pytest.raises(error):
        make()
