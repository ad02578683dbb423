"""`Fabric` in this process alone: arguments, what is set up, the loop, checkpoints, callbacks, loggers."""

import copy
import pickle
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise import DDPStrategy, Fabric, SingleDeviceStrategy
from rankwise.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    LaunchRefusedError,
    LifecycleError,
    MissingAttributeError,
    UnknownArgumentError,
)
from rankwise.fabric import FabricModule, FabricOptimizer
from rankwise.loggers import CSVLogger
from rankwise.precision import Precision
from tests.helpers.raising import raises
from tests.unit.fabric.helpers import Classifier, data, fabric, largest_difference


def ready(
    make: Any = torch.optim.SGD, lr: float = 0.1, **options: Any
) -> tuple[Fabric, Classifier, Any, Any]:
    """Return a Fabric, a classifier, and what the Fabric makes of that and of its optimizer."""
    one, own = fabric(**options), Classifier()
    return one, own, *one.setup(own, make(own.parameters(), lr=lr))


def largest_gradient(module: nn.Module) -> float:
    """Return the largest magnitude in any gradient."""
    return max(float(each.grad.abs().max()) for each in module.parameters() if each.grad is not None)


def by_hand(epochs: int = 2, size: int = 8) -> dict[str, Tensor]:
    """Return the weights after a loop of plain torch, over the samples in order."""
    module = Classifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in DataLoader(data(), batch_size=size):
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
    return module.state_dict()


def test_a_loop_gives_what_plain_torch_gives() -> None:
    """The same batches, the same weights, to the bit."""
    one, _, module, optimizer = ready(torch.optim.Adam, lr=0.01)
    loader = one.setup_dataloaders(DataLoader(data(), batch_size=8))
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            one.backward(module.training_step(batch))
            optimizer.step()
    assert largest_difference(module.state_dict(), by_hand()) == 0


def test_what_a_fabric_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks, device and strategy; no launch is needed for one process. It prints once, and seeds."""
    one = fabric()
    places = (one.global_rank, one.local_rank, one.node_rank, one.world_size, one.is_global_zero)
    assert places == (0, 0, 0, 1, True)
    assert (one.device, one.accelerator) == (torch.device("cpu"), "cpu")
    one.launch()
    assert (one.broadcast("x"), one.all_reduce(1.5)) == ("x", 1.5)
    assert one.to_device({"a": torch.ones(1)})["a"].device == one.device
    with one.rank_zero_first():
        one.barrier()
    one.print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"
    assert Fabric.seed_everything(7) == 7
    first = torch.rand(1)
    Fabric.seed_everything(7)
    assert torch.equal(first, torch.rand(1))


def test_launch_returns_the_functions_value() -> None:
    """The function gets the Fabric first, then its arguments; one that takes no Fabric is refused."""
    assert fabric().launch(lambda own, a, b: (own.world_size, a, b), 2, b=3) == (1, 2, 3)
    wrong: list[Any] = [3, lambda: None]
    for function in wrong:
        raises(InvalidTypeError, "that takes the Fabric", fabric().launch, function)


def test_processes_must_be_launched() -> None:
    """What needs other ranks, or a process group, is an error before the launch; a fork needs a function."""
    two = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    own = Classifier()
    loader = DataLoader(data())
    optimizer = torch.optim.SGD(own.parameters())
    for call in (
        *(
            lambda: two.setup(own),
            lambda: two.setup_optimizers(optimizer),
            lambda: two.setup_dataloaders(loader),
        ),
        *(lambda: two.all_gather(1.0), lambda: two.save("x", {}), lambda: two.load("x"), two.barrier),
    ):
        raises(LifecycleError, "not launched", call)
    raises(LaunchRefusedError, "needs the function", two.launch)
    strategy = DDPStrategy(accelerator="cpu", devices=1, start_method="fork")
    one = Fabric(strategy=strategy)
    assert one.strategy is strategy
    raises(LifecycleError, "not launched", one.setup, Classifier())


def test_a_subclass_with_run_launches_itself() -> None:
    """`run` gets its arguments and returns its value; without it `run` says what to do."""

    class Mine(Fabric):
        def run(self, number: int) -> tuple[int, bool]:
            return number, self.strategy.is_in_job

    assert Mine(accelerator="cpu", devices=1).run(4) == (4, True)
    raises(ConfigurationError, "does not define run", fabric().run)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"strategy": "ddp_spwan"}, ConfigurationError, "ddp_spawn"),
        ({"precision": "17-mixed"}, ConfigurationError, "17-mixed"),
        ({"loggers": 3}, InvalidTypeError, "loggers"),
        ({"plugins": [3]}, InvalidTypeError, "plugins"),
        ({"strategy": SingleDeviceStrategy(gradient_weighting="samples")}, ConfigurationError, "samples"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """In the constructor, by name; Lightning's contexts for creating modules where they are read."""
    raises(error, text, Fabric, accelerator="cpu", **options)
    for name in ("init_module", "init_tensor", "sharded_model"):
        raises(MissingAttributeError, f"Fabric has no {name}", getattr, fabric(), name)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_setup_refuses_what_it_cannot_honour() -> None:
    """What was set up, a scheduler alone, another optimizer's scheduler, and no module at all."""
    one, own = fabric(), Classifier()
    plain = torch.optim.SGD(own.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(own.parameters(), lr=0.1), 1)
    module, optimizer = one.setup(own, plain)
    raises(InvalidArgumentError, "set up before", one.setup, module)
    raises(InvalidArgumentError, "set up before", one.setup_optimizers, optimizer)
    raises(ConfigurationError, "without an optimizer", one.setup, own, scheduler=scheduler)
    with pytest.raises(ConfigurationError, match="another optimizer"):
        one.setup(own, torch.optim.SGD(own.parameters(), lr=0.1), scheduler=scheduler)
    raises(InvalidTypeError, "module", one.setup, plain)
    raises(ConfigurationError, "got none", one.setup_optimizers)
    raises(InvalidArgumentError, "_reapply_compile", one.setup, torch.compile(own), _reapply_compile=False)


def test_setup_returns_what_it_was_given() -> None:
    """A module alone, with optimizers, with a scheduler, apart; an optimizer is of its class."""
    one, own = fabric(), Classifier()
    first, second = (torch.optim.SGD(own.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1)
    assert isinstance(one.setup(own), FabricModule)
    module, *optimizers, same = one.setup(own, first, second, scheduler=scheduler)
    assert isinstance(module, FabricModule)
    assert [each.optimizer for each in optimizers] == [first, second]
    assert same is scheduler
    assert isinstance(one.setup_module(own), FabricModule)
    apart = one.setup_optimizers(torch.optim.Adam(own.parameters()))
    assert isinstance(apart, (FabricOptimizer, torch.optim.Adam))
    own_optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    _, optimizer = one.setup(own, own_optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where a scheduler steps before its optimizer
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == own_optimizer.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(own_optimizer.param_groups) == 2


def test_a_closure_steps() -> None:
    """L-BFGS calls its closure several times."""
    one, own = fabric(), Classifier()
    module, optimizer = one.setup(own, torch.optim.LBFGS(own.parameters(), max_iter=4))
    x, y = data().tensors
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module.training_step((x, y))
        one.backward(loss)
        losses.append(float(loss.detach()))
        return loss

    optimizer.step(closure)
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_gradients_are_clipped() -> None:
    """By norm, which is returned, or by value; not by both, nor by none; a norm of NaN is an error."""
    one, own, module, optimizer = ready()
    one.backward(module.training_step(data().tensors))
    norm = one.clip_gradients(module, optimizer, max_norm=1e-3)
    clipped = torch.nn.utils.get_total_norm([each.grad for each in own.parameters() if each.grad is not None])
    assert norm is not None
    assert float(norm) > float(clipped) == pytest.approx(1e-3, rel=1e-3)
    assert one.clip_gradients(module, optimizer, clip_val=1e-5) is None
    assert largest_gradient(own) <= 1e-5
    both: list[dict[str, Any]] = [{}, {"clip_val": 1.0, "max_norm": 1.0}]
    for options in both:
        raises(ConfigurationError, "give one of the two", one.clip_gradients, module, optimizer, **options)
    next(own.parameters()).grad = torch.full((8, 4), torch.nan)
    raises(FloatingPointError, "nan", one.clip_gradients, module, optimizer, max_norm=1.0)
    assert one.clip_gradients(module, optimizer, max_norm=1.0, error_if_nonfinite=False) is not None


def test_backward_takes_torchs_options() -> None:
    """By position and by name; others are refused. `no_backward_sync` needs a module that was set up."""
    one = fabric()
    x = torch.ones(2, requires_grad=True)
    one.backward(x * 3, torch.ones(2), retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    raises(UnknownArgumentError, "model", one.backward, x.sum(), model=nn.Linear(1, 1))
    raises(ConfigurationError, "weight", one.backward, x.sum(), weight=2)
    raises(InvalidTypeError, r"Fabric\.setup", one.no_backward_sync, Classifier())
    with one.no_backward_sync(one.setup(Classifier())):  # with one process it does nothing
        pass


# ------------------------------------------------------------------------------------------- the module


def test_a_module_is_the_users() -> None:
    """Attributes, parameters, submodules, names and modes are those of the user's module; so is a copy."""
    own = Classifier()
    module = fabric().setup(own)
    assert module.module is own
    assert dict(module.named_parameters()).keys() == dict(own.named_parameters()).keys()
    assert list(module.state_dict()) == list(own.state_dict())
    assert module.layers is own.layers
    assert module.count() == own.count()
    module.calls = 5
    assert own.calls == 5
    module.eval()
    assert (own.training, own.layers.training) == (False, False)
    module.training = True
    assert (own.training, own.layers.training) == (True, False)
    assert (module.train(), own.layers.training) == (module, True)
    module.load_state_dict({name: value + 1 for name, value in own.state_dict().items()})
    module.to(torch.float64)
    assert own.first.weight.dtype is torch.float64
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018  the access itself raises
    raises(InvalidArgumentError, "assign", module.load_state_dict, own.state_dict(), assign=True)
    assert type(copy.deepcopy(module)) is Classifier
    assert type(pickle.loads(pickle.dumps(module))) is Classifier


def test_marked_methods_run_in_the_precision() -> None:
    """`training_step` is marked from the start; another method is refused until it is."""
    module = fabric(precision="bf16-mixed").setup(Classifier())
    x, y = data().tensors
    assert module.training_step((x, y)).dtype is torch.float32
    raises(ConfigurationError, r"mark_forward_method\('loss'\)", module.loss, x, y)
    with torch.no_grad():
        module.loss(x, y)
    module.mark_forward_method("loss")
    assert module.loss(x, y).requires_grad
    assert not module.module._forward_pre_hooks
    wrong: dict[Any, type[Exception]] = {3: InvalidTypeError, "forward": InvalidArgumentError}
    for name, error in {**wrong, "no": InvalidArgumentError}.items():
        raises(error, None, module.mark_forward_method, name)


def test_formats() -> None:
    """The module computes in the precision, which gets all modules; its output has torch's default dtype."""
    seen = []
    dtypes = {"bf16-mixed": torch.bfloat16, "64-true": torch.float64, "bf16-true": torch.bfloat16}
    for name, dtype in dtypes.items():
        own = Classifier()
        own.first.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
        one = fabric(precision=name)
        output = one.setup(own)(torch.ones(2, 4))
        assert seen.pop() is dtype
        assert output.dtype is (torch.float64 if name == "64-true" else torch.float32)
        with one.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype or name == "64-true"

    given: list[Any] = []

    class Noting(Precision):
        def configure(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
            given.append(module)

    one, modules = fabric(plugins=[Noting()]), [Classifier(), Classifier()]
    for own in modules:
        one.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    assert [given[0], *given[1]] == [modules[0], *modules]


def test_a_scaled_loss_needs_the_fabrics_backward() -> None:
    """`loss.backward()` would not scale; one that is weighted needs its weight and the window's block."""
    one, own, module, optimizer = ready(precision="16-mixed")
    raises(ConfigurationError, r"fabric\.backward", module.training_step(data().tensors).backward)
    optimizer.zero_grad()
    before = own.first.weight.detach().clone()
    one.backward(module.training_step(data().tensors))
    assert largest_gradient(own) > 1  # scaled
    optimizer.step()
    assert largest_gradient(own) < 1  # unscaled
    assert not torch.equal(before, own.first.weight)
    one, own, module, optimizer = ready(strategy=SingleDeviceStrategy(gradient_weighting="logged"))
    x, y = data().tensors
    raises(ConfigurationError, "has no weight", one.backward, module.training_step((x, y)))
    raises(ConfigurationError, "outside of the block", one.backward, module.training_step((x, y)), weight=32)
    for start, end in ((0, 20), (20, 32)):  # two microbatches of different sizes
        with one.gradient_sync_context(module, optimizer, is_final_microbatch=end == 32):
            one.backward(module.training_step((x[start:end], y[start:end])), weight=end - start)
    plain = Classifier()
    plain.training_step((x, y)).backward()
    torch.testing.assert_close(own.first.weight.grad, plain.first.weight.grad)


def test_master_weights_follow_what_is_loaded(tmp_path: Path) -> None:
    """A step starts from the loaded weights, not from older copies; copies and scale are in a checkpoint."""
    one, own, module, optimizer = ready(lr=0.0, precision="bf16-master")
    module.load_state_dict({name: torch.zeros_like(value) for name, value in own.state_dict().items()})
    one.backward(module.training_step(data().tensors))
    optimizer.step()
    assert all(not each.detach().any() for each in own.parameters())
    one, _, module, optimizer = ready(lr=1e-6, precision="16-master")
    one.backward(module.training_step(data().tensors))
    optimizer.step()
    masters = [each.clone() for each in optimizer.param_groups[0]["params"]]
    one.save(tmp_path / "x", {"model": module, "optimizer": optimizer})
    two, _, other, sgd = ready(lr=1e-6, precision="16-master")
    assert two.load(tmp_path / "x", {"model": other, "optimizer": sgd}) == {}
    assert all(map(torch.equal, sgd.param_groups[0]["params"], masters))
    assert one.strategy.precision.state_dict()["scaler"] == two.strategy.precision.state_dict()["scaler"]


# ------------------------------------------------------------------------------------------- loaders


def test_each_iteration_has_another_order() -> None:
    """A loader that shuffles gets the number of the iteration; another Fabric repeats the first."""
    torch.manual_seed(3)
    loader = fabric().setup_dataloaders(DataLoader(range(16), batch_size=4, shuffle=True))  # type: ignore[arg-type]  # a sequence
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert all(sorted(chain(*batches)) == list(range(16)) for batches in (first, second))
    again = fabric().setup_dataloaders(DataLoader(range(16), batch_size=4, shuffle=True))  # type: ignore[arg-type]  # a sequence
    assert [batch.tolist() for batch in again] == first
    assert (len(loader), loader.batch_size) == (4, 4)


def test_loaders_that_cannot_be_set_up() -> None:
    """None at all, what is no loader, what was set up, and options without effect."""
    one = fabric()
    raises(ConfigurationError, "got none", one.setup_dataloaders)
    raises(InvalidTypeError, "torch DataLoader", one.setup_dataloaders, [1, 2])
    first, second = one.setup_dataloaders(DataLoader(data()), DataLoader(data()))
    raises(InvalidTypeError, "torch DataLoader", one.setup_dataloaders, first)
    with pytest.raises(ConfigurationError, match="each_sample_once"):
        one.setup_dataloaders(DataLoader(data()), use_distributed_sampler=False, each_sample_once=True)
    assert len(second) == 32


# ------------------------------------------------------------------------------------------- checkpoints


def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Module, optimizer and values are restored in place; the rest of the file is returned."""
    one, _, module, optimizer = ready(torch.optim.Adam, lr=0.01)
    one.backward(module.training_step(data().tensors))
    optimizer.step()
    path = tmp_path / "a" / "state.ckpt"
    one.save(path, {"model": module, "optimizer": optimizer, "epoch": 3, "more": [1]})
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    fresh = Classifier()
    other, adam = one.setup(fresh, torch.optim.Adam(fresh.parameters(), lr=0.5))
    state = {"model": other, "optimizer": adam, "epoch": 0}
    assert one.load(path, state) == {"more": [1]}
    assert state["epoch"] == 3
    assert largest_difference(other.state_dict(), saved) == 0
    assert adam.param_groups[0]["lr"] == 0.01
    assert set(one.load(path)) == {"model", "optimizer", "epoch", "more"}
    raises(CheckpointError, "has no 'scheduler'", one.load, path, {"scheduler": None})
    rest = one.load(path, {"scheduler": None, "epoch": 0}, strict=False)
    assert rest.keys() == {"model", "optimizer", "more"}
    raises(InvalidArgumentError, "weights_only", one.load, path, weights_only=False)
    raises(CheckpointError, "cannot be restored", one.load, path, {"model": one.setup(nn.Linear(1, 1))})


def test_a_part_of_a_state_is_saved(tmp_path: Path) -> None:
    """By filters; those that fit nothing are refused. `load_raw` reads the state of one object."""
    one = fabric()
    module = one.setup(Classifier())
    one.save(tmp_path / "x", {"model": module}, filter={"model": lambda name, value: name.endswith("bias")})
    assert list(one.load(tmp_path / "x")["model"]) == ["first.bias", "layers.0.bias", "layers.2.bias"]
    with pytest.raises(ConfigurationError, match="'other'"):
        one.save(tmp_path / "x", {"model": module}, filter={"other": lambda name, value: True})
    raises(InvalidTypeError, "filter", one.save, tmp_path / "x", {"model": module}, filter={"model": 3})
    own = Classifier()
    torch.save({name: value + 1 for name, value in own.state_dict().items()}, tmp_path / "x")
    one.load_raw(tmp_path / "x", module)
    assert largest_difference(module.state_dict(), own.state_dict()) == 1
    raises(InvalidTypeError, "a module or an optimizer", one.load_raw, tmp_path / "x", {})
    torch.save({}, tmp_path / "x")
    raises(CheckpointError, r"first\.weight", one.load_raw, tmp_path / "x", module)
    one.load_raw(tmp_path / "x", module, strict=False)


# ----------------------------------------------------------------------------------- callbacks, loggers


def test_callbacks_are_called() -> None:
    """Those that have the method, with the keywords that they take; `setup` and `step` call theirs."""

    class Notes:
        name = "x"

        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_epoch(self, epoch: int) -> None:
            self.seen.append(f"epoch {epoch}")

        def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
            self.seen.append(type(module).__name__)

        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            self.seen.append(type(optimizer).__name__)

    notes = Notes()
    one, own = fabric(callbacks=[notes, object()]), Classifier()
    _, optimizer = one.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    optimizer.step()
    one.call("on_epoch", epoch=1, loss=0.5)
    one.call("on_nothing")
    assert notes.seen == ["FabricModule", "SGD", "epoch 1"]
    raises(InvalidTypeError, r"Notes\.name", one.call, "name")


def test_numbers_are_logged(tmp_path: Path) -> None:
    """Tensors become numbers; the file is complete when the launched function has ended."""
    logger = CSVLogger(tmp_path)
    one = fabric(loggers=logger)

    def main(one: Fabric) -> None:
        one.log("loss", torch.tensor(0.5), step=1)
        one.log_dict({"loss": 0.25, "accuracy": 1}, step=2)

    assert one.logger is logger
    one.launch(main)
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert text.splitlines() == ["loss,step,accuracy", "0.5,1,", "0.25,2,1"]
    raises(ConfigurationError, "no logger", getattr, fabric(), "logger")
