"""Jobs for tests: `run_distributed`, and the contracts of strategies and launchers, checked in jobs."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checkpoint import TorchCheckpointIO
from rankwise.checks import check_callable, check_choice, check_is_a, check_minimum, check_value
from rankwise.errors import (
    CheckpointError,
    InvalidArgumentError,
    UnknownNameError,
    WorkerError,
    WorkerRaisedError,
)
from rankwise.strategies import DDPElasticStrategy, DDPStrategy, Strategy
from rankwise.testing.contracts import Contract, expect, expect_equal, expect_error

T = TypeVar("T")
S = TypeVar("S", bound=Strategy)

START_METHODS = ("fork", "spawn", "forkserver")
"""The start methods that run a function of the calling process."""

_STEPS = 10
_ROWS = 4  # of a global batch, for each rank
_SETTLE_S = 0.3


def run_distributed(
    function: Callable[..., T],
    *args: Any,
    world_size: int = 2,
    timeout: float = 60.0,
    start_method: str = "fork",
    accelerator: str = "cpu",
) -> list[T]:
    """Run `function(strategy, *args)` on every rank of a new job; return all values in rank order.

    The ranks have a process group: collectives of `torch.distributed` and of the strategy work. No process is
    left when the call returns or raises.

    Args:
        function: the function to run. With `"fork"` it may be a lambda or a closure.
        args: its further arguments.
        world_size: the number of ranks, all on this node.
        timeout: seconds for the whole job. When they are over, the ranks write their stacks to stderr and are
            killed.
        start_method: `"fork"` (ranks begin with what this process has imported), `"spawn"` or
            `"forkserver"`.
        accelerator: `"cpu"` or `"cuda"`; CUDA needs `"spawn"` or `"forkserver"` if this process uses it.

    Raises:
        WorkerError: the first rank's failure. Its text has the tracebacks of all ranks: how they failed, or
            where they were when they were stopped.
        WorkerTimedOutError: when the job took longer than `timeout`.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_callable("function", function)
    return run_on(new_strategy(world_size, timeout, start_method, accelerator), function, *args)


def new_strategy(
    world_size: int, timeout: float, start_method: str = "fork", accelerator: str = "cpu"
) -> DDPStrategy:
    """Return a strategy with so many ranks on this node, also under a launcher such as srun."""
    check_is_a("world_size", world_size, int)
    check_minimum("world_size", world_size, 1)
    check_choice("start_method", start_method, START_METHODS)
    strategy = DDPStrategy(
        accelerator=accelerator, devices=world_size, start_method=start_method, cluster_environment="local"
    )
    return within(timeout, strategy)


def within(timeout: float, strategy: S) -> S:
    """Return such a strategy whose launches may take so many seconds; torch's agent keeps no limit."""
    check_is_a("timeout", timeout, (int, float), "a number of seconds")
    check_value("timeout", timeout, timeout > 0, "more than 0 seconds")
    changes = {} if isinstance(strategy, DDPElasticStrategy) else {"time_limit": timeout}
    return strategy.with_(**changes)


def run_on(strategy: Strategy, function: Callable[..., T], *args: Any) -> list[T]:
    """Launch a function; return the local ranks' values in rank order. A failure shows all tracebacks."""
    try:
        strategy.launch(function, *args)
    except WorkerError as error:
        error.shows_others = True
        raise
    return [strategy.results[rank] for rank in sorted(strategy.results)]


def check_strategy(
    strategy: Strategy, *, exact: bool = True, tolerance: float = 1e-6, timeout: float = 120.0
) -> None:
    """Check that a strategy does what the rest of rankwise relies on; it needs a few launches.

    Runs on: the main process; in a script whose strategy runs it again, every rank calls this.

    Args:
        strategy: with the devices to check it on, two or more where it can have them. It stays as it is.
        exact: whether training must give the weights of one process on the same global batches. Otherwise all
            ranks must only end with the same weights.
        tolerance: the largest difference between these weights.
        timeout: seconds for each launch, unless torch's elastic agent starts the ranks.

    Raises:
        ContractError: with a line for each rule that the strategy breaks.
        WorkerError: when a rank does not get through, with the tracebacks of all ranks.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_is_a("strategy", strategy, Strategy)
    contract = Contract()
    with contract.rule("with_() returns another strategy of its class, not bound, and changes nothing"):
        before = dict(vars(strategy))
        derived = strategy.with_(timeout=7)
        expect_equal((type(derived), derived.is_bound, derived.timeout.seconds), (type(strategy), False, 7))
        expect(derived is not strategy, "it is the same one")
        expect_equal(vars(strategy), before)
    with tempfile.TemporaryDirectory() as folder:
        limit = tolerance if exact else None
        for problems in run_on(within(timeout, strategy), problems_on_rank, folder, limit):
            contract.problems += problems
    _check_next_launch(contract, within(timeout, strategy))
    contract.check(strategy)


def _check_next_launch(contract: Contract, strategy: Strategy) -> None:
    """Check a second launch; where ranks are processes of their own, one of them fails."""
    ranks = strategy.bind()
    last = ranks.global_rank + ranks.local_world_size - 1
    if strategy.runs_in_caller:
        with contract.rule("the next launch works too"):
            expect(
                strategy.global_rank in run_on(strategy, attrgetter("global_rank")),
                "the values are not the ranks'",
            )
        return
    with contract.rule("the failure of a rank is raised, by its number and with its traceback"):
        with expect_error(WorkerRaisedError, f"global_rank={last}", "in _fail_on"):
            run_on(strategy, _fail_on, last)
        expect_equal(strategy.results, {})


def _fail_on(strategy: Strategy, rank: int) -> NoReturn:
    if strategy.global_rank == rank:
        raise ValueError("a failure for the test")
    strategy.barrier()
    raise AssertionError("the barrier has returned without a rank")


def check_launcher(strategy: Strategy, *, timeout: float = 60.0) -> None:
    """Check that a launcher runs a function once as each local rank, and reports the rank that fails.

    `check_strategy` also checks what the ranks do together.

    Args:
        strategy: one that uses the launcher, with two ranks or more. It stays as it is.
        timeout: seconds for each launch.

    Raises:
        ContractError: with a line for each rule that the launcher breaks.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    check_is_a("strategy", strategy, Strategy)
    contract = Contract()
    launched = within(timeout, strategy)
    ranks = launched.bind()
    expected = list(range(ranks.global_rank, ranks.global_rank + ranks.local_world_size))
    shared = torch.zeros(ranks.world_size)
    with contract.rule("a function runs once as each rank; its values are returned by global rank"):
        values = run_on(launched, _facts_on_rank, shared)
        expect_equal(sorted(launched.results), expected)
        expect_equal([rank for rank, *_ in values], expected)
        expect_equal([variable for _, variable, *_ in values], [str(rank) for rank in expected])
    if not launched.runs_in_caller:
        with contract.rule("each rank is a process of its own"):
            pids = {os.getpid(), *(launched.results[rank][2] for rank in launched.results)}
            expect_equal(len(pids), len(expected) + 1)
        with contract.rule("each rank has memory of its own: a tensor is copied, not shared"):
            expect_equal([launched.results[rank][3] for rank in launched.results], [1.0] * len(expected))
            expect_equal(float(shared.sum()), 0.0)
        texts = f"global_rank={expected[-1]}", "in _fail_alone"
        sentence = "a rank that raises is a WorkerError with its number and its traceback"
        with contract.rule(sentence, WorkerError, *texts):
            run_on(within(timeout, strategy), _fail_alone, expected[-1])
    contract.check(strategy)


def _facts_on_rank(strategy: Strategy, memory: torch.Tensor) -> tuple[int, str, int, float]:
    memory[strategy.global_rank] += 1
    time.sleep(_SETTLE_S)  # so that a rank that shares the memory has written to it
    return strategy.global_rank, os.environ["RANK"], os.getpid(), float(memory.sum())


def _fail_alone(strategy: Strategy, rank: int) -> None:
    expect(strategy.global_rank != rank, "a failure for the test")


def problems_on_rank(strategy: Strategy, folder: str, tolerance: float | None) -> list[str]:
    """Return the rules that a strategy breaks on this rank. Collective.

    A tolerance of None: training need not give the weights of one process.
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
        with contract.rule(
            "a checkpoint that rank 0 cannot write is an error on every rank", CheckpointError
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
