"""Compiled modules are wrapped and trained like others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the forks, which take it along
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import SingleDeviceStrategy, Strategy
from rankwise.errors import InvalidTypeError
from rankwise.testing import run_distributed
from tests.process.training_tasks import FEATURES, Regression, loader, quiet_trainer

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang"))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def made(backend: Any) -> Any:
    return net() if backend is None else torch.compile(net(), backend=backend)


def train(strategy: Strategy, backend: str | None, world: int) -> dict[str, Any]:
    """Take 3 steps on this rank's part of 8 samples, compiled or not."""
    graphs = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = strategy.setup_module(made(noting if backend == "own" else backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(8 * FEATURES).reshape(8, FEATURES).float().sin()[strategy.global_rank :: world]
    for step in range(3):
        optimizer.zero_grad()
        with strategy.no_backward_sync(model, enabled=step == 0):
            strategy.backward(model(x).square().mean())
        if step:
            optimizer.step()
    return {
        "wrapper": type(model).__name__,
        "is_ddp": isinstance(model, DistributedDataParallel),
        "keys": list(strategy.get_module_state_dict(model)),
        "weights": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        "graphs": len(graphs),
    }


def compare(strategy: Strategy, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train uncompiled, then compiled, as the same rank."""
    return train(strategy, None, strategy.world_size), train(strategy, backend, strategy.world_size)


def check(plain: dict[str, Any], compiled: dict[str, Any]) -> None:
    """Compiled training gives the same weights, under names without a prefix."""
    torch.testing.assert_close(compiled["weights"], plain["weights"], rtol=0, atol=1e-6)
    assert compiled["keys"] == plain["keys"] == list(net().state_dict())


@pytest.mark.quick
def test_compiled_within_the_wrapper() -> None:
    """A module from torch.compile is compiled within its wrapper: two ranks train as with a plain one."""
    ranks = run_distributed(compare, "own")
    for plain, compiled in ranks:
        check(plain, compiled)
        assert compiled["is_ddp"]
        assert compiled["graphs"] > 0
    first, second = (compiled["weights"] for _, compiled in ranks)
    assert torch.equal(first, second)


def test_one_device() -> None:
    """Without a wrapper the compiled module itself is what is called."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    plain, compiled = strategy.launch(compare, "own")
    check(plain, compiled)
    assert compiled["wrapper"] == "OptimizedModule"


@pytest.mark.soak
@pytest.mark.timeout(600)  # torch's code generator takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's compiler itself
@pytest.mark.skipif(not HAS_COMPILER, reason="torch's default compiler back end needs a C++ compiler")
def test_the_default_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with torch's own code generator, which leaves thread pools open."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled beforehand
    for plain, compiled in run_distributed(compare, "inductor", timeout=600):
        check(plain, compiled)


class Compiled(Regression):
    """Its forward is compiled in place, on each rank; counts the graphs."""

    graphs = 0

    def setup(self, stage: str) -> None:
        def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.graphs += 1
            return graph.forward

        self.compile(backend=noting)


def test_a_training_module_compiled_in_place() -> None:
    """`self.compile()` compiles what training_step calls as `self(x)`, within the wrapper."""
    expected, module = Regression(), Compiled()
    quiet_trainer("ddp_fork", 2, max_epochs=1).fit(expected, loader(24, 4))
    quiet_trainer("ddp_fork", 2, max_epochs=1).fit(module, loader(24, 4))
    assert module.graphs > 0
    torch.testing.assert_close([*module.parameters()], [*expected.parameters()], rtol=0, atol=1e-12)


def test_a_compiled_training_module_is_refused() -> None:
    """`torch.compile(model)` hides the steps of a TrainingModule: the error names the alternative."""
    compiled: Any = torch.compile(Regression(), backend="eager")
    with pytest.raises(InvalidTypeError, match=r"model\.compile\(\), and fit\(model\)"):
        quiet_trainer("ddp_fork", 2).fit(compiled, loader(8, 4))
