"""Communication hooks: by name, as functions, in wrappers, registered by users; and errors."""

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)

from rankwise.errors import (
    ConfigurationError,
    DuplicateNameError,
    EnvironmentVariableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingExtraError,
    UnknownArgumentError,
    UnknownNameError,
)
from rankwise.gradient_sync import CommHookRegistry, HookPlace, register_ddp_comm_hook
from rankwise.gradient_sync.hook_registry import PowerSGDMemory
from rankwise.strategies import DDPStrategy
from tests.helpers.exactness import weights
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.process.training_tasks import Regression, loader, quiet_trainer
from tests.unit.gradient_sync.helpers import (
    accumulate,
    alone,
    assert_close,
    assert_each,
    bare,
    batch,
    gradients,
    loss_of,
    net,
    on_ranks,
)

TORCHS = cast(Any, default_hooks)  # untyped


def reduced(**arguments: Any) -> list[list[Tensor | None]]:
    """Return both ranks' gradients of one microbatch."""
    return on_ranks(2, lambda s, m: accumulate(s, m, (2,)), net(), **arguments)


def noting_hook(what: Callable[[dist.GradBucket], Any]) -> Any:
    """Return a hook that averages, and notes something of each bucket in its state, a list."""

    def noting(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(what(bucket))
        future: torch.futures.Future[Tensor] = TORCHS.allreduce_hook(None, bucket)
        return future

    return noting


def expected() -> list[Tensor | None]:
    """Return one process's gradients."""
    return alone(net(), [batch(0), batch(1)])


@pytest.mark.parametrize(
    ("hook", "atol"),
    [
        *(("allreduce", 1e-12), ("fp16_compress", 1e-2), ("BF16_compress", 1e-1)),
        *(("powersgd:matrix_approximation_rank=2", 1e-12), (TORCHS.allreduce_hook, 1e-12)),
        *((TORCHS.fp16_compress_hook, 1e-2), (TORCHS.bf16_compress_hook, 1e-1)),
    ],
)
def test_comm_hook_averages(hook: Any, atol: float) -> None:
    """Hooks by name, in any case, and as functions; bf16 too, which torch's hook does not support on gloo."""
    first, second = reduced(comm_hook=hook)
    assert_close(first, second)
    assert_close(first, expected(), atol)
    if atol > 1e-12:
        with pytest.raises(AssertionError):  # it is compressed
            assert_close(first, expected())


def test_noop_leaves_each_rank_its_own() -> None:
    """`"noop"` communicates nothing."""
    first, second = reduced(comm_hook="noop")
    assert_close(first, alone(net(), [batch(0)]))
    assert_close(second, alone(net(), [batch(1)]))


@pytest.mark.parametrize("wrapper", ["fp16", "bf16_compress", TORCHS.fp16_compress_wrapper])
def test_comm_wrapper(wrapper: Any) -> None:
    """A wrapper casts the bucket of another hook."""
    seen: list[torch.dtype] = []
    noting = noting_hook(lambda bucket: bucket.buffer().dtype)
    assert_each(reduced(comm_hook=noting, comm_wrapper=wrapper, comm_state=seen), expected(), 1e-1)
    assert set(seen) == {torch.bfloat16 if wrapper == "bf16_compress" else torch.float16}


def test_own_hook_with_state() -> None:
    """The hook gets the state; its annotations may be strings, which torch alone does not accept."""
    counts: list[int] = []
    counting = noting_hook(lambda bucket: bucket.buffer().numel())
    assert_each(reduced(comm_hook=counting, comm_state=counts), expected())
    assert counts == [21, 21]


def test_register_ddp_comm_hook_by_lightnings_keywords() -> None:
    """`ddp_comm_state`, `ddp_comm_hook` and `ddp_comm_wrapper` are the same arguments; both names are not."""
    models, seen = [net(), net()], list[int]()
    counting = noting_hook(lambda bucket: bucket.buffer().itemsize)

    def train(rank: int) -> list[Tensor | None]:
        wrapped = bare(models[rank])
        register_ddp_comm_hook(
            wrapped,
            ddp_comm_state=seen,
            ddp_comm_hook=counting,
            ddp_comm_wrapper=TORCHS.fp16_compress_wrapper,
        )
        loss_of(wrapped, batch(rank)).backward()
        with pytest.raises(ConfigurationError, match="two names"):
            register_ddp_comm_hook(wrapped, hook="noop", ddp_comm_hook="noop")
        return gradients(models[rank])

    assert_each(run_ranks(2, train), expected(), 1e-2)
    assert seen == [2, 2]
    raises(InvalidTypeError, "DistributedDataParallel", register_ddp_comm_hook, net(), None, "noop")


def test_registered_hook_uses_the_local_world_size(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LOCAL_WORLD_SIZE` is the size of post-local SGD's default subgroup."""
    found: list[int] = []

    def make_state(place: HookPlace) -> Any:
        found.append(place.local_world_size)
        return place.process_group

    names.register("placed", TORCHS.allreduce_hook, make_state)
    models = [net(), net()]
    for variable, expected in ((None, 2), ("1", 1), ("8", 2)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable) if variable else None
        run_ranks(2, lambda rank: register_ddp_comm_hook(bare(models[rank]), hook="placed"))
        assert found == [expected] * 2
        found.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(EnvironmentVariableError, match="LOCAL_WORLD_SIZE is not a number"):
        run_ranks(2, lambda rank: register_ddp_comm_hook(bare(models[rank]), hook="placed"))


@pytest.fixture
def names() -> Iterator[Any]:
    """Restore the registry."""
    before = set(CommHookRegistry)
    yield CommHookRegistry
    for name in set(CommHookRegistry) - before:
        CommHookRegistry.remove(name)


def test_hooks_can_be_registered(names: Any) -> None:
    """A user's hook can have a name, and options for its state."""

    def make_state(place: HookPlace, *, factor: float = 1) -> tuple[float, Any]:
        return factor, place.process_group

    def scaled(state: tuple[float, Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        factor, group = state
        averaged = TORCHS.allreduce_hook(group, bucket)
        future: torch.futures.Future[Tensor] = averaged.then(lambda done: done.value() * factor)
        return future

    names.register("Scaled", scaled, make_state, "scales")
    assert "scaled" in names
    assert len(names) == len(list(names)) > 6
    assert names.describe("SCALED") == "scales"
    assert "scaled" in repr(names)
    for result in reduced(comm_hook="scaled:factor=0.5"):
        assert_close([None if g is None else g * 2 for g in result], expected())
    raises(DuplicateNameError, r"CommHookRegistry.register\(\"scaled\"", names.register, "SCALED", scaled)
    raises(UnknownArgumentError, "Did you mean 'factor'", DDPStrategy, comm_hook="scaled:facter=2")
    raises(InvalidTypeError, "name", names.register, "", scaled)
    raises(InvalidTypeError, "two arguments", names.register, "wrong", lambda bucket: bucket)


AVERAGING: dict[str, Any] = {"comm_hook": "post_localsgd", "model_averaging_period": 2}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"comm_hook": "fp16compress"}, UnknownNameError, "Did you mean 'fp16_compress'"),
        ({"comm_hook": "noop:rank=1"}, UnknownArgumentError, "takes no argument 'rank'"),
        ({"comm_hook": "powersgd:matrix_rank=1"}, UnknownArgumentError, "matrix_approximation_rank"),
        ({"comm_hook": "powersgd:matrix_approximation_rank=0"}, InvalidArgumentError, "1 or more"),
        ({"comm_hook": "powersgd:start_powerSGD_iter=1"}, ConfigurationError, "start_powerSGD_iter"),
        ({"comm_hook": "powersgd:rank"}, InvalidTypeError, "option=value"),
        ({"comm_hook": 3}, InvalidTypeError, "a name, or a function"),
        ({"comm_hook": lambda bucket: bucket}, InvalidTypeError, "two arguments"),
        ({"comm_hook": nn.Module}, InvalidTypeError, "two arguments"),
        ({"comm_hook": batched_powerSGD_hook}, ConfigurationError, "batched_powerSGD_hook cannot be used"),
        ({"comm_state": 1}, ConfigurationError, "comm_state is given without"),
        ({"comm_wrapper": "fp16"}, ConfigurationError, "comm_wrapper is given without"),
        ({"comm_hook": "noop", "comm_wrapper": "fp61"}, UnknownNameError, "Did you mean 'fp16'"),
        ({"comm_hook": "noop", "comm_wrapper": 3}, InvalidTypeError, "from a hook to a hook"),
        ({"comm_hook": "powersgd:warm_start=false", "comm_state": 1}, ConfigurationError, "has options"),
        ({"comm_hook": "post_localsgd"}, ConfigurationError, "model_averaging_period is needed"),
        ({"model_averaging_period": 2}, ConfigurationError, "post-local SGD"),
        (AVERAGING | {"model_averaging_period": 0}, InvalidArgumentError, "1 or more"),
        (AVERAGING | {"model_averaging_period": "2"}, InvalidTypeError, "a number of steps"),
        (AVERAGING | {"sync_mode": "multi_auto_sync"}, ConfigurationError, "multi_auto_sync"),
        (AVERAGING | {"find_unused_parameters": True}, ConfigurationError, "multi_auto_sync"),
        (AVERAGING | {"comm_hook": "post_localsgd:subgroup_size=0"}, InvalidArgumentError, "subgroup_size"),
    ],
)
def test_refused_in_the_constructor(arguments: Any, error: type[Exception], words: str) -> None:
    """Invalid hooks and options are errors before any process starts."""
    raises(error, words, DDPStrategy, **arguments)


def test_powersgd_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error without NumPy says how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    raises(MissingExtraError, r"rankwise\[powersgd\]", DDPStrategy, comm_hook="powersgd")


def test_powersgd_on_cpus_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's hook would fail there when it begins to compress."""
    trainer = quiet_trainer(DDPStrategy(comm_hook="powersgd"), 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    raises(ConfigurationError, "hide the GPU", trainer.fit, Regression(), loader(4, 2))


def test_pickling_a_state_of_torch() -> None:
    """Torch's own state needs a process group when it is unpickled; within a strategy it does not."""
    state = PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=7)
    strategy = pickle.loads(pickle.dumps(DDPStrategy(comm_hook=powerSGD_hook, comm_state=state)))
    copy = strategy.gradients.hook.state
    assert isinstance(copy, PowerSGDState)
    assert (copy.matrix_approximation_rank, copy.start_powerSGD_iter, copy.process_group) == (3, 7, None)


@pytest.mark.parametrize("name", sorted(CommHookRegistry))
def test_pickling_named_hooks(name: str) -> None:
    """A strategy with a named hook can be pickled."""
    period = 2 if name == "post_localsgd" else None
    strategy = DDPStrategy(comm_hook=name, comm_wrapper="fp16", model_averaging_period=period)
    assert pickle.loads(pickle.dumps(strategy)).gradients.hook.name == name


# ------------------------------------------------------------------------------------------- memory


def train_steps(
    strategy: ThreadedStrategy, wrapped: nn.Module, steps: range, *more: nn.Parameter
) -> torch.optim.Optimizer:
    """Train on some of an endless series of batches; return the optimizer, which may have more parameters."""
    optimizer = torch.optim.SGD([*wrapped.parameters(), *more], lr=0.1)
    strategy.on_after_setup_optimizers([optimizer])
    for number in steps:
        optimizer.zero_grad()
        with strategy.gradient_sync_context(wrapped):
            loss_of(wrapped, batch(strategy.global_rank, number)).backward()
        strategy.optimizer_step(optimizer)
    return optimizer


def big_net() -> nn.Module:
    """Return a model with matrices that PowerSGD compresses, in several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()


POWERSGD: dict[str, Any] = {
    "comm_hook": "powersgd:start_powerSGD_iter=2,min_compression_rate=1",
    "bucket_cap_mb": 0.002,
}


def test_powersgd_refuses_a_random_state_that_no_run_has_written() -> None:
    """NumPy itself would read memory at any position."""
    memory = PowerSGDMemory(PowerSGDState(None, 1))
    saved = memory.state_dict()
    saved["random"][2] = 10**6
    raises(ValueError, "position 1000000 is outside", memory.load_state_dict, saved)


def test_powersgd_resumes_from_its_state() -> None:
    """A run that stops and goes on with what all ranks remember ends as one that never stopped.

    Without the memory it does not, and DDP's other buckets after a restart do no harm.
    """

    def run(strategy: ThreadedStrategy, wrapped: nn.Module, *, stop_at: int, remembers: bool) -> Tensor:
        train_steps(strategy, wrapped, range(stop_at))
        if stop_at < 8:
            box = [strategy.gradients.gathered_states()]
            dist.broadcast_object_list(box)
            strategy.gradients.detach()
            strategy.job.modules.close()
            strategy.gradients.load_states(box[0] if remembers else [])
            again = strategy.setup_module(strategy.unwrap_module(wrapped))
            train_steps(strategy, again, range(stop_at, 8))
        return weights(wrapped)

    def stopped(stop_at: int, remembers: bool = True) -> Tensor:
        first, second = on_ranks(
            2, lambda s, m: run(s, m, stop_at=stop_at, remembers=remembers), big_net(), **POWERSGD
        )
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
        tensor: Tensor = first
        return tensor

    whole = stopped(8)
    without = float((stopped(5, remembers=False) - whole).abs().max())
    # The bases of the first step's other buckets are drawn anew; the errors, which count, are not lost.
    assert float((stopped(5) - whole).abs().max()) < without > 1e-4


def states_after_four_steps(strategy: ThreadedStrategy, wrapped: nn.Module) -> Any:
    train_steps(strategy, wrapped, range(4))
    return strategy.gradients.gathered_states()


def test_saved_hook_states_are_plain_and_by_rank(tmp_path: Any) -> None:
    """Saved states load with `weights_only=True`; there is one per rank, with errors by parameter name."""
    states, nothing = on_ranks(2, states_after_four_steps, big_net(), **POWERSGD)
    assert nothing == []
    torch.save(states, tmp_path / "states")
    [[first], [second]] = torch.load(tmp_path / "states", weights_only=True)
    assert first["iter"] == second["iter"] == 4
    assert set(first["errors"]) == {name for name, _ in big_net().named_parameters()}
    assert any(
        float(error.abs().max()) > 0 and not torch.equal(error, second["errors"][name])
        for name, error in first["errors"].items()
    )


def test_hook_states_with_another_world_size() -> None:
    """With another number of ranks each rank gets the mean of the errors, so that their sum stays."""
    states, _ = on_ranks(2, states_after_four_steps, big_net(), **POWERSGD)

    def go_on(strategy: ThreadedStrategy, wrapped: nn.Module) -> Any:
        strategy.gradients.load_states(states)
        return strategy.gradients.own_states()

    for [own] in on_ranks(3, go_on, big_net(), **POWERSGD):
        for name, error in own["errors"].items():
            mean = (states[0][0]["errors"][name] + states[1][0]["errors"][name]) / 2
            torch.testing.assert_close(error, mean)


# ------------------------------------------------------------------------------------------- local SGD


LOCAL: dict[str, Any] = {
    "comm_hook": "post_localsgd:start_localSGD_iter=2,post_local_gradient_allreduce=false",
    "model_averaging_period": 3,
}


def local_steps(strategy: ThreadedStrategy, wrapped: nn.Module, steps: int, ends: bool = False) -> Tensor:
    """Train with post-local SGD, and return the weights."""
    train_steps(strategy, wrapped, range(steps))
    if ends:
        strategy.sync_models()
    return weights(wrapped)


@pytest.mark.parametrize(("steps", "is_same"), [(2, True), (3, True), (4, False), (5, False), (6, True)])
def test_model_averaging_period(steps: int, is_same: bool) -> None:
    """After the warm-up the ranks' models differ, and every third step averages them, as in one process."""
    first, second = on_ranks(2, lambda s, m: local_steps(s, m, steps), net(), **LOCAL)
    assert torch.equal(first, second) == is_same


def test_the_period_goes_on_in_the_next_job() -> None:
    """The steps of the job before count: the sixth step of both together averages the models."""

    def run(strategy: ThreadedStrategy, wrapped: nn.Module) -> Tensor:
        local_steps(strategy, wrapped, 4)
        strategy.gradients.detach()
        strategy.job.modules.close()
        return local_steps(strategy, strategy.setup_module(strategy.unwrap_module(wrapped)), 2)

    first, second = on_ranks(2, run, net(), **LOCAL)
    assert torch.equal(first, second)


def test_training_ends_with_one_model() -> None:
    """After any number of steps all ranks end with the mean of their models."""
    apart = on_ranks(2, lambda s, m: local_steps(s, m, 5), net(), **LOCAL)
    ended = on_ranks(2, lambda s, m: local_steps(s, m, 5, ends=True), net(), **LOCAL)
    assert_each(ended, torch.stack(apart).mean(dim=0))


def test_parameters_without_gradients_are_not_averaged() -> None:
    """A mean of equal numbers is rounded, and would change a frozen parameter."""

    def run(strategy: ThreadedStrategy, wrapped: nn.Module) -> bool:
        frozen = nn.Parameter(torch.arange(100.0).double() / 3, requires_grad=False)
        before = frozen.clone()
        train_steps(strategy, wrapped, range(4), frozen)
        strategy.sync_models()
        return torch.equal(frozen, before)

    assert all(on_ranks(3, run, net(), **LOCAL))


def test_what_has_changed_is_averaged() -> None:
    """A parameter that the last step of a period did not use is averaged with the others."""

    def run(strategy: ThreadedStrategy, wrapped: nn.Module) -> Tensor:
        optimizer = train_steps(strategy, wrapped, range(5))
        optimizer.zero_grad()
        strategy.gradients.after_step(optimizer)  # the sixth step
        return weights(wrapped)

    first, second = on_ranks(2, run, net(), **LOCAL)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_what_was_averaged_is_not_averaged_again() -> None:
    """Training that ends with the step that averaged the models reduces nothing more."""

    def reductions(ends: bool) -> dict[int, list[int]]:
        with counted_reductions() as sizes:
            on_ranks(2, lambda s, m: local_steps(s, m, 3, ends), net(), **LOCAL)
        return sizes

    assert reductions(ends=True) == reductions(ends=False)


def test_local_sgd_in_groups() -> None:
    """With `subgroup_size` ranks of a subgroup have one model; the size must divide the world size."""
    hook = "post_localsgd:start_localSGD_iter=0,subgroup_size={}"
    options: dict[str, Any] = {"comm_hook": hook.format(2), "model_averaging_period": 100}
    found = on_ranks(4, lambda s, m: local_steps(s, m, 3), net(), **options)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ConfigurationError, match="groups of 3"):
        on_ranks(4, lambda s, m: None, net(), **{**options, "comm_hook": hook.format(3)})


def test_distributed_optimizers_are_refused_with_averaging() -> None:
    """`ZeroRedundancyOptimizer` updates other parameters on each rank, so averaging is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
        raises(ConfigurationError, "ZeroRedundancyOptimizer", strategy.on_after_setup_optimizers, [optimizer])
        raises(ConfigurationError, "ZeroRedundancyOptimizer", strategy.gradients.after_step, optimizer)

    on_ranks(1, run, net(), **LOCAL)
