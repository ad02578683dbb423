"""What every strategy must do on each rank of a job: the rules of `check_strategy`."""

from __future__ import annotations

import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import CheckpointError, InvalidArgumentError, UnknownNameError
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.testing.contract import Contract, expect, expect_equal, expect_error

_STEPS = 10
_ROWS = 4  # of a global batch, for each rank


def problems_on_rank(strategy: Strategy, folder: str, tolerance: float | None) -> list[str]:
    """Return the rules that a strategy breaks on this rank. Collective.

    `folder` is for checkpoints. With a tolerance of None training need not give the weights of one process.
    """
    warnings.simplefilter("default")  # a warning that one rank raises would leave the others waiting
    contract = Contract()
    for check in (_places, _reductions, _gathers, _agreements, _wrapping, _state, _accumulation, _batches):
        check(contract, strategy)
    _checkpoints(contract, strategy, strategy.broadcast(folder))  # of a script each rank has made one
    for options in (_Training(), _Training(microbatches=4), _Training(clip=0.05)):
        _training(contract, strategy, options, tolerance)
    return contract.problems


def _places(contract: Contract, strategy: Strategy) -> None:
    with contract.rule("each rank has a number of its own, and samplers split by it"):
        numbers = [(strategy.global_rank, strategy.world_size)]
        found = [rank for [rank] in strategy.all_gather_object(numbers)]
        expect_equal(found, [(rank, strategy.world_size) for rank in range(strategy.world_size)])
        expect_equal(strategy.is_global_zero, strategy.global_rank == 0)
        if strategy.data_parallel_group is None:
            sampler = {"num_replicas": strategy.world_size, "rank": strategy.global_rank}
            expect_equal(strategy.distributed_sampler_kwargs, sampler)


def _reductions(contract: Contract, strategy: Strategy) -> None:
    size = strategy.world_size
    own = torch.tensor([strategy.global_rank + 1.0, 2.0])
    total, product = size * (size + 1) / 2, float(torch.arange(1, size + 1).prod())
    expected = {"sum": [total, 2.0 * size], "mean": [total / size, 2.0], "min": [1.0, 2.0]}
    more = {"avg": expected["mean"], "MAX": [float(size), 2.0], "product": [product, 2.0**size]}
    for name, values in {**expected, **more}.items():
        with contract.rule(f"all_reduce(reduce_op={name!r})"):
            expect_equal(strategy.all_reduce(own, reduce_op=name), torch.tensor(values))
    with contract.rule("all_reduce averages by default, and does not change the tensor that it is given"):
        expect_equal(strategy.all_reduce(own), torch.tensor(expected["mean"]))
        expect_equal(own, torch.tensor([strategy.global_rank + 1.0, 2.0]))
    with contract.rule("the mean of whole numbers is not rounded; their sum stays whole; a dtype is kept"):
        whole = torch.tensor([strategy.global_rank, 3])
        expect_equal(strategy.all_reduce(whole).tolist(), [(size - 1) / 2, 3.0])
        expect_equal(strategy.all_reduce(whole + 1, reduce_op="sum"), torch.tensor([int(total), 4 * size]))
        half = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
        expect_equal(strategy.all_reduce(half), half)
    with contract.rule("all_reduce returns what is no tensor, and refuses an unknown operation"):
        expect_equal([strategy.all_reduce(each) for each in (3, "text", None, [1])], [3, "text", None, [1]])
        with expect_error(UnknownNameError):
            strategy.all_reduce(own, reduce_op="median")


def _gathers(contract: Contract, strategy: Strategy) -> None:
    size = strategy.world_size
    with contract.rule("all_gather stacks in rank order; with one process it is the identity"):
        expected = torch.tensor([[[rank + 1.0, 5.0]] for rank in range(size)])
        own = torch.tensor([[strategy.global_rank + 1.0, 5.0]])
        expect_equal(strategy.all_gather(own), expected if size > 1 else expected[0])
    with contract.rule("with sync_grads each rank gets the gradient of every rank's use of its slice"):
        leaf = torch.tensor([strategy.global_rank + 1.0], requires_grad=True)
        gathered = strategy.all_gather(leaf, sync_grads=True)
        (gathered.flatten() * torch.arange(1.0, size + 1.0)).sum().backward()
        expect_equal(leaf.grad, torch.tensor([size * (strategy.global_rank + 1.0)]))
    with contract.rule("all_gather_object gathers in rank order"):
        found = strategy.all_gather_object({"rank": strategy.global_rank})
        expect_equal(found, [{"rank": rank} for rank in range(size)])


def _agreements(contract: Contract, strategy: Strategy) -> None:
    last = strategy.world_size - 1
    is_zero, is_last = strategy.global_rank == 0, strategy.global_rank == last
    with contract.rule("no rank passes a barrier before the last one has come"):
        strategy.barrier()
        time.sleep(0.1 if is_last else 0.0)
        came_s = time.monotonic()  # one clock for all processes of a node
        strategy.barrier("a name")
        passed_s = time.monotonic()
        came, passed = zip(*strategy.all_gather_object((came_s, passed_s)), strict=True)
        expect(min(passed) >= max(came), "a rank passed early")
    with contract.rule("broadcast returns the value of its source, and refuses one that does not exist"):
        expect_equal(strategy.broadcast({"from": strategy.global_rank}), {"from": 0})
        expect_equal(strategy.broadcast(["from", strategy.global_rank], src=last), ["from", last])
        with expect_error(InvalidArgumentError):
            strategy.broadcast(1, src=strategy.world_size)
    of_all = ((True, True), (False, False), (is_zero, last == 0))
    of_any = ((is_zero, True), (is_last, True), (False, False))
    asked = [*((*each, True) for each in of_all), *((*each, False) for each in of_any)]
    for decision, answer, is_of_all in asked:
        with contract.rule("reduce_boolean_decision is the same plain bool on every rank"):
            found = strategy.reduce_boolean_decision(decision, all=is_of_all)
            expect(found is answer, f"{found!r} instead of {answer!r} with all={is_of_all}")


class _Model(nn.Module):
    """A small model with a method beside `forward`, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs

    def step(self, inputs: Tensor, scale: float) -> Tensor:
        loss: Tensor = self(inputs).square().mean() * scale
        return loss


def _new_model() -> _Model:
    """Return the same model at each call, in any process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _Model()


def _wrapping(contract: Contract, strategy: Strategy) -> None:
    own, frozen = _new_model(), nn.Linear(2, 2).requires_grad_(False)
    is_ddp = isinstance(strategy, DDPStrategy) and strategy.world_size > 1
    with torch.no_grad():
        own.second.bias.fill_(strategy.global_rank)
    wrapped = strategy.setup_module(own)
    with contract.rule("setup_module gives every rank the weights of rank 0"):
        expect_equal(own.second.bias.detach().cpu(), torch.zeros(2))
    with contract.rule("unwrap_module returns the module that setup_module was given"):
        expect(strategy.unwrap_module(wrapped) is own, "it is another one")
    with contract.rule("a DDPStrategy wraps in DistributedDataParallel, where there are several ranks"):
        expect_equal(isinstance(wrapped, DistributedDataParallel), is_ddp)
    with contract.rule("call_method runs a method as the forward pass; `forward` is then as before"):
        inputs = torch.ones(2, 4, device=strategy.root_device) * (strategy.global_rank + 1)
        strategy.call_method(wrapped, "step", inputs, 2.0).backward()
        gradients = strategy.all_gather(own.second.bias.grad)
        expect(not is_ddp or torch.equal(gradients[0], gradients[-1]), "gradients are not averaged")
        expect("forward" not in own.__dict__, "`forward` is replaced")
    with contract.rule("a module without trainable parameters is no problem"):
        ready = strategy.setup_module(frozen)
        expect(strategy.unwrap_module(ready) is frozen, "unwrap_module returns another one")
        expect(not isinstance(strategy, DDPStrategy) or ready is frozen, "it is wrapped")
        strategy.no_backward_sync(ready)
    with contract.rule("no_backward_sync of a DDPStrategy needs the wrapped module"):
        if is_ddp:
            with expect_error(TypeError):
                strategy.no_backward_sync(own)


def _state(contract: Contract, strategy: Strategy) -> None:
    own = _new_model()
    wrapped = strategy.setup_module(own)
    with contract.rule("get_module_state_dict has the module's own keys"):
        state = strategy.get_module_state_dict(wrapped)
        expect_equal(list(state), list(own.state_dict()))
    with contract.rule("load_module_state_dict writes into the module"):
        zeros = {name: torch.zeros_like(value) for name, value in own.state_dict().items()}
        strategy.load_module_state_dict(wrapped, zeros)
        expect_equal(float(own.first.weight.detach().abs().sum()), 0.0)


def _accumulation(contract: Contract, strategy: Strategy) -> None:
    own, plain = _new_model(), _new_model().to(strategy.root_device)
    wrapped = strategy.setup_module(own)
    inputs = torch.ones(1, 4, device=strategy.root_device) * (strategy.global_rank + 1)
    with contract.rule("under no_backward_sync gradients stay as they are on this rank"):
        with strategy.no_backward_sync(wrapped):
            strategy.backward(strategy.call_method(wrapped, "step", inputs, 1.0))
        plain.step(inputs, 1.0).backward()
        expect_equal(own.second.bias.grad, plain.second.bias.grad, 1e-6)
    with contract.rule("a DDPStrategy averages them in the next backward pass without it"):
        strategy.backward(strategy.call_method(wrapped, "step", inputs, 1.0))
        gradients: list[Any] = strategy.all_gather_object(own.second.bias.grad)
        if isinstance(wrapped, DistributedDataParallel):
            expect(torch.equal(gradients[0], gradients[-1]), "gradients differ")


class _Pair(NamedTuple):
    """A named tuple in a batch."""

    left: Tensor
    right: str


def _batches(contract: Contract, strategy: Strategy) -> None:
    with contract.rule("batch_to_device moves tensors and keeps all else, named tuples too"):
        pair = _Pair(torch.ones(2), "text")
        batch: Any = {"pair": pair, "list": [torch.zeros(1), 3], "deep": ([{"a": (1,)}],)}
        moved = strategy.batch_to_device(batch)
        expect_equal((type(moved["pair"]), moved["pair"].right), (_Pair, "text"))
        expect_equal(moved["pair"].left, pair.left.to(strategy.root_device))
        expect_equal((moved["list"][1:], moved["deep"]), ([3], batch["deep"]))


def _checkpoints(contract: Contract, strategy: Strategy, folder: str) -> None:
    path = f"{folder}/state.ckpt"
    with contract.rule("a checkpoint is rank 0's, and every rank reads it"):
        strategy.save_checkpoint({"rank": strategy.global_rank, "tensor": torch.arange(3)}, path)
        read = strategy.load_checkpoint(path)
        strategy.barrier()
        expect_equal((read["rank"], read["tensor"].tolist()), (0, [0, 1, 2]))
    if isinstance(strategy.checkpoint_io, TorchCheckpointIO):
        with (
            contract.rule("a checkpoint that rank 0 cannot write is an error on every rank"),
            expect_error(CheckpointError),
        ):
            strategy.save_checkpoint({}, f"{path}/below/it")


class _Training(NamedTuple):
    """How the training of a rule accumulates and clips gradients."""

    microbatches: int = 1
    clip: float = 0.0

    def __str__(self) -> str:
        clipped = f" and gradients clipped to {self.clip}" if self.clip else ""
        return f"training with {self.microbatches} microbatches in a step{clipped}"


def _data(step: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = _ROWS * world_size
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def _new_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _training(contract: Contract, strategy: Strategy, options: _Training, tolerance: float | None) -> None:
    with contract.rule(f"{options} ends with the same weights on every rank"):
        found = _trained(strategy, options)
        for name, value in found.items():
            for rank, other in enumerate(strategy.all_gather_object(value)):
                expect(torch.equal(value, other), f"{name} differs from that of global_rank={rank}")
    with contract.rule(f"{options} gives the weights of one process"):
        if tolerance is not None:
            for name, value in _trained_alone(strategy.world_size, options).items():
                expect_equal(found[name], value, tolerance)


def _trained(strategy: Strategy, options: _Training) -> dict[str, Tensor]:
    wrapped = strategy.setup_module(_new_model())
    optimizer = _new_optimizer(wrapped)
    strategy.on_after_setup_optimizers([optimizer])
    share = _ROWS // options.microbatches
    for step in range(_STEPS):
        inputs, targets = strategy.batch_to_device(_data(step, strategy.world_size))
        optimizer.zero_grad()
        for micro in range(options.microbatches):
            first = (micro * strategy.world_size + strategy.global_rank) * share
            rows, is_final = slice(first, first + share), micro + 1 == options.microbatches
            with strategy.gradient_sync_context(wrapped, [optimizer], is_final):
                loss = nn.functional.mse_loss(wrapped(inputs[rows]), targets[rows]) / options.microbatches
                strategy.backward(loss)
        if options.clip:
            strategy.precision.clip_gradients_norm(optimizer, options.clip)
        strategy.optimizer_step(optimizer)
    strategy.sync_models()
    return {name: value.detach().cpu() for name, value in strategy.get_module_state_dict(wrapped).items()}


def _trained_alone(world_size: int, options: _Training) -> dict[str, Tensor]:
    """Return the weights after the same steps in one process, with plain torch."""
    model = _new_model()
    optimizer = _new_optimizer(model)
    for step in range(_STEPS):
        inputs, targets = _data(step, world_size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
    return model.state_dict()
