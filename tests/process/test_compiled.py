"""Compiled modules are wrapped and trained like others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the forks, which take it along
from torch import Tensor, nn

from rankwise import SingleDeviceStrategy, Strategy
from rankwise.errors import InvalidTypeError
from rankwise.testing import run_distributed
from tests.process.training_tasks import FEATURES, Regression, loader, quiet_trainer

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang"))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def train(strategy: Strategy, backend: str | None) -> tuple[nn.Module, int]:
    """Take 3 steps on this rank's part of 8 samples, compiled or not; return the module, and its graphs."""
    graphs = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    chosen: Any = noting if backend == "own" else backend
    given: Any = torch.compile(net(), backend=chosen) if backend else net()
    model = strategy.setup_module(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(8 * FEATURES).reshape(8, FEATURES).float().sin()
    x = x[strategy.global_rank :: strategy.world_size]
    for step in range(3):
        optimizer.zero_grad()
        with strategy.no_backward_sync(model, enabled=step == 0):
            strategy.backward(model(x).square().mean())
        if step:
            optimizer.step()
    return model, len(graphs)


def compare(strategy: Strategy, backend: str) -> tuple[list[str], int, Tensor]:
    """Train uncompiled, then compiled, as the same rank: weights are the same, and names have no prefix.

    Returns the names of the compiled module's classes, the number of its graphs, and its weights.
    """
    (plain, _), (compiled, graphs) = train(strategy, None), train(strategy, backend)
    expected, weights = (nn.utils.parameters_to_vector(each.parameters()) for each in (plain, compiled))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    for module in (plain, compiled):
        assert [*strategy.get_module_state_dict(module)] == [*net().state_dict()]
    return [kind.__name__ for kind in type(compiled).__mro__], graphs, weights.detach()


@pytest.mark.quick
def test_compiled_within_the_wrapper() -> None:
    """A module from torch.compile is compiled within its wrapper: two ranks train as with a plain one."""
    first, second = run_distributed(compare, "own")
    for kinds, graphs, _ in (first, second):
        assert "DistributedDataParallel" in kinds
        assert graphs > 0
    assert torch.equal(first[-1], second[-1])


def test_one_device() -> None:
    """Without a wrapper the compiled module itself is what is called."""
    kinds, _, _ = SingleDeviceStrategy(accelerator="cpu").launch(compare, "own")
    assert kinds[0] == "OptimizedModule"


@pytest.mark.soak
@pytest.mark.timeout(600)  # torch's code generator takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's compiler itself
@pytest.mark.skipif(not HAS_COMPILER, reason="torch's default compiler back end needs a C++ compiler")
def test_the_default_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with torch's own code generator, which leaves thread pools open."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled beforehand
    run_distributed(compare, "inductor", timeout=600)


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
