"""Communication hooks, weights and sharded optimizers through the Trainer, on two real processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from rankwise import Trainer
from rankwise.callbacks import ModelCheckpoint
from rankwise.errors import ConfigurationError, UnusedParametersError, WorkerRaisedError
from rankwise.gradient_sync import hook_registry, register_ddp_comm_hook
from rankwise.strategies import DDPStrategy
from tests.helpers.exactness import Case, Model, cases, expected_weights
from tests.helpers.exactness import loader as case_loader
from tests.process.continued_tasks import sharded_adam
from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer

POWERSGD: dict[str, Any] = {
    "comm_hook": "powersgd:start_powerSGD_iter=2,min_compression_rate=1",
    "bucket_cap_mb": 0.0002,
}


def trainer_on(arguments: dict[str, Any], max_steps: int, **options: Any) -> Trainer:
    return quiet_trainer(ddp("fork", **arguments), 2, max_steps=max_steps, **options)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def gradients(module: nn.Module, wrapped: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    nn.functional.mse_loss(wrapped(x), y).backward()
    return flat_gradients(module)


def flat_gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def fitted(arguments: dict[str, Any], steps: int, module: Any = None, **options: Any) -> tuple[Trainer, Any]:
    trainer, module = trainer_on(arguments, steps), module or Regression("adam")
    trainer.fit(module, loader(64, 4), **options)
    return trainer, module


def test_hook_memory_goes_through_a_checkpoint(tmp_path: Path) -> None:
    """A run with PowerSGD that is resumed, from the caller's checkpoint, ends as one that went through."""
    _, whole = fitted(POWERSGD, 8)
    stopped, module = fitted(POWERSGD, 5)
    stopped.save_checkpoint(tmp_path / "five.ckpt")
    checkpoint = torch.load(tmp_path / "five.ckpt", weights_only=True)
    states = checkpoint.pop("comm_hooks")
    assert [[entry["iter"] for entry in entries] for entries in states] == [[5], [5]]

    _, resumed = fitted(POWERSGD, 8, ckpt_path=tmp_path / "five.ckpt")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)

    torch.save(checkpoint, tmp_path / "less.ckpt")
    _, forgetful = fitted(POWERSGD, 8, ckpt_path=tmp_path / "less.ckpt")
    assert not torch.allclose(weights(forgetful), weights(whole), rtol=0, atol=1e-6)
    names = {name for name, _ in module.named_parameters()}
    assert stopped.strategy.gradients.gathered_states()[1][0]["errors"].keys() == names


def test_hook_memory_comes_back_to_the_caller() -> None:
    """A second fit goes on with the memory of the first; another module's fit starts without any."""
    trainer, module = fitted(POWERSGD, 5)
    trainer.max_steps = 8
    states: Any = None
    for each in (module, Regression("adam")):
        trainer.fit(each, loader(64, 4))
        states = trainer.strategy.gradients.gathered_states()
        assert [[entry["iter"] for entry in entries] for entries in states] == [[8], [8]]
    assert float(states[0][0]["errors"]["net.0.weight"].abs().max()) > 0


def trained_in_many_buckets(strategy: DDPStrategy) -> list[Tensor]:
    """Return the weights of a model whose compressed gradients fill nine buckets, after some steps."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    wrapped = strategy.setup_module(nn.Sequential(*layers).double())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + strategy.global_rank)
        with strategy.gradient_sync_context(wrapped):
            wrapped(torch.randn(4, 64, generator=generator).double()).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in wrapped.parameters()]


@pytest.mark.parametrize("by", ["name", "function"])
def test_powersgd_in_many_buckets_on_gloo(by: str) -> None:
    """The hook's later all-reduces of several buckets have the same order on all ranks."""
    hook: dict[str, Any] = {"comm_hook": "powersgd:start_powerSGD_iter=2,min_compression_rate=0.5"}
    if by == "function":
        hook = {"comm_hook": powerSGD_hook, "comm_state": PowerSGDState(None, 1, 2, min_compression_rate=0.5)}
    strategy = ddp("fork", timeout=10, bucket_cap_mb=0.03, **hook)
    strategy.launch(trained_in_many_buckets)
    for first, second in zip(strategy.results[0], strategy.results[1], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


class Sharded(Regression):
    def configure_optimizers(self) -> Any:
        return sharded_adam(self.parameters())


@pytest.mark.soak
def test_optimizer_state_of_a_sharded_optimizer(tmp_path: Path) -> None:
    """It equals Adam on one rank. The caller, and checkpoints, have its whole state, so that fits go on."""
    expected_module = Regression("adam")
    quiet_trainer("single_device", 1, max_steps=6).fit(expected_module, loader(64, 8))

    trainer, module = fitted({}, 3, Sharded())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    trainer.max_steps = 6
    trainer.fit(module, loader(64, 4))
    [saved] = torch.load(tmp_path / "three.ckpt", weights_only=True)["optimizer_states"]
    assert set(saved["state"]) == set(range(4))
    _, resumed = fitted({}, 6, Sharded(), ckpt_path=tmp_path / "three.ckpt")
    for each in (module, resumed):
        torch.testing.assert_close(weights(each), weights(expected_module), rtol=0, atol=1e-9)


def test_averaging_refuses_a_sharded_optimizer() -> None:
    """The error of every rank is the one that says so."""
    arguments = {"comm_hook": "post_localsgd", "model_averaging_period": 2}
    with pytest.raises(WorkerRaisedError, match="ZeroRedundancyOptimizer") as caught:
        fitted(arguments, 3, Sharded())
    assert caught.value.exception_type == ConfigurationError.__name__


class Apart(Regression):
    """Notes how far the ranks' weights are apart where one model is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.distances: dict[str, list[float]] = {"step": [], "validation": [], "checkpoint": []}

    def note(self, moment: str) -> None:
        """Collective: every rank must call this."""
        first, second = self.trainer.strategy.all_gather_object(weights(self))
        self.distances[moment].append(float((first - second).abs().max()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("step")

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note("checkpoint")


@pytest.mark.quick
def test_one_model_is_validated_and_saved(tmp_path: Path) -> None:
    """Between averages of post-local SGD, validations and checkpoints average the models too."""
    hook = "post_localsgd:start_localSGD_iter=0,subgroup_size=1"
    arguments = {"comm_hook": hook, "model_averaging_period": 4}
    apart, callbacks = Apart(), ModelCheckpoint(tmp_path, every_n_train_steps=7, save_last=True)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": callbacks, "val_check_interval": 3}
    trainer_on(arguments, 8, **options).fit(apart, loader(64, 4), loader(10, 4))
    assert [bool(distance) for distance in apart.distances["step"]] == [False, True, True, True] * 2
    assert (apart.distances["validation"], apart.distances["checkpoint"][:1]) == ([0.0] * 2, [0.0])


class Partial(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


@pytest.mark.quick
def test_unused_parameters_are_named() -> None:
    """DDP's error comes back with the names, by rank, from the first step."""
    with pytest.raises(WorkerRaisedError, match="2 parameters of Partial") as caught:
        fitted({}, 1, Partial())
    assert caught.value.exception_type == UnusedParametersError.__name__
    assert "unused on global_rank=0: 'spare.weight', 'spare.bias'" in str(caught.value)


def check_on_processes(case: Case) -> None:
    strategy, module = ddp("fork", devices=case.world_size, **case.strategy_options), Model(case)
    quiet_trainer(strategy, case.world_size, **case.trainer_options).fit(module, case_loader(case))
    torch.testing.assert_close(weights(module), expected_weights(case), rtol=0, atol=1e-6)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(cases().filter(lambda case: case.world_size > 1))
def test_ranks_equal_one_process(case: Case) -> None:
    """Real processes, too, train the model of one process; see tests/unit/gradient_sync."""
    check_on_processes(case)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@settings(max_examples=60, deadline=None, database=None)
@given(cases().filter(lambda case: case.world_size > 1))
def test_ranks_equal_one_process_again_and_again(case: Case) -> None:
    """The same, over many more draws, which differ from run to run."""
    check_on_processes(case)


NAMES = ("allreduce", "fp16_compress", "bf16_compress", "powersgd")
ATOL = {"fp16_compress": 1e-2, "bf16_compress": 5e-2}
HOOKS = [*((name, None) for name in NAMES), (None, "logged"), ("fp16_compress", "logged")]


def gradients_by_hook(strategy: DDPStrategy) -> list[Tensor]:
    """Return the gradients of 4 of 8 samples; of 1 or 7, whose batches count by their size, with weights."""
    found, (x, y) = [], loader(8, 8).dataset[:]
    for hook, weighting in HOOKS:
        strategy.gradients = DDPStrategy(comm_hook=hook, gradient_weighting=weighting).gradients
        module, first = Regression(), 1 if weighting else 4
        wrapped = strategy.setup_module(module)
        own = slice(0, first) if strategy.global_rank == 0 else slice(first, 8)
        for _ in range(2):
            wrapped.zero_grad()
            with strategy.gradient_sync_context(wrapped):
                loss = nn.functional.mse_loss(wrapped(x[own]), y[own])
                # The weights are too large for 16 bits.
                loss = strategy.weighted_loss(loss, 10_000 * len(x[own])) if weighting else loss
                loss.backward()
        found.append(flat_gradients(module))
    return found


def test_hooks_work_on_gloo() -> None:
    """Every averaging hook gives gloo's ranks the same gradients, near one process's; bf16, weights too."""
    strategy, single = ddp("fork"), Regression()
    strategy.launch(gradients_by_hook)
    expected = gradients(single, single, loader(8, 8).dataset[:])
    for (name, _), first, second in zip(HOOKS, strategy.results[0], strategy.results[1], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, expected, rtol=0, atol=ATOL.get(name or "", 1e-12))


def registered_by_hand(strategy: DDPStrategy) -> list[Tensor]:
    found = []
    hooks: list[tuple[Any, Any]] = [
        *((None, None), ("allreduce", "fp16"), ("powersgd:start_powerSGD_iter=2", None)),
        *(("post_localsgd", None), (hook_registry.allreduce_hook, None)),
    ]
    for hook, wrapper in hooks:
        module = Regression()
        wrapped = nn.parallel.DistributedDataParallel(module)
        register_ddp_comm_hook(wrapped, hook=hook, wrapper=wrapper)
        found.append(gradients(module, wrapped, loader(8, 8).dataset[strategy.global_rank :: 2]))
    return found


@pytest.mark.quick
def test_register_ddp_comm_hook() -> None:
    """`register_ddp_comm_hook(model, state, hook, wrapper)` on a wrapper of torch's, by name and callable."""
    strategy = ddp("fork")
    strategy.launch(registered_by_hand)
    for plain, *others in strategy.results.values():
        for other in others:
            torch.testing.assert_close(other, plain, rtol=0, atol=1e-2)
    assert not torch.equal(*strategy.results[0][:2])  # 16 bits show
