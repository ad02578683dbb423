"""What every strategy must do: one function that runs on each rank and returns its facts."""

import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.strategies import Strategy

Facts = dict[str, Any]
Pair = namedtuple("Pair", ["left", "right"])

STEPS = 20
GLOBAL_BATCH = 8


def facts_of(strategy: Strategy, folder: str) -> Facts:
    """Return the facts of this rank, by the names that the tests use."""
    return {
        "ranks": strategy.ranks,
        "is_global_zero": strategy.is_global_zero,
        "sampler": strategy.distributed_sampler_kwargs,
        **_reductions(strategy),
        **_gathers(strategy),
        **_agreements(strategy),
        **_modules(strategy),
        **_accumulation(strategy),
        **_checkpoints(strategy, folder),
        "batch": _batch(strategy),
        "trained": _trained(strategy, 1),
        "accumulated": _trained(strategy, 4),
    }


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        return " ".join(kinds)
    return ""


def _reductions(strategy: Strategy) -> Facts:
    own = torch.tensor([strategy.global_rank + 1.0, 2.0])
    names = ("sum", "mean", "avg", "min", "max", "product", "SUM")
    return {
        "reduced": {name: strategy.all_reduce(own, reduce_op=name).tolist() for name in names},
        "reduced_default": strategy.all_reduce(own).tolist(),
        "input_after": own.tolist(),
        "integers": strategy.all_reduce(torch.tensor([strategy.global_rank, 3])).tolist(),
        "integer_sum": strategy.all_reduce(torch.tensor(strategy.global_rank + 1), reduce_op="sum"),
        "half": strategy.all_reduce(torch.tensor([0.5, 1.5], dtype=torch.bfloat16)),
        "non_tensors": [strategy.all_reduce(value) for value in (3, "text", None, [1])],
        "bad_operation": _raised(lambda: strategy.all_reduce(own, reduce_op="median")),
    }


def _gathers(strategy: Strategy) -> Facts:
    own = torch.tensor([[strategy.global_rank + 1.0, 5.0]])
    leaf = torch.tensor([strategy.global_rank + 1.0], requires_grad=True)
    gathered = strategy.all_gather(leaf, sync_grads=True)
    weights = torch.arange(1.0, strategy.world_size + 1.0)
    (gathered.flatten() * weights).sum().backward()
    without = strategy.all_gather(own)
    return {
        "gathered": without.tolist(),
        "gathered_gradient": None if leaf.grad is None else leaf.grad.tolist(),
        "gathered_objects": strategy.all_gather_object({"rank": strategy.global_rank}),
    }


def _agreements(strategy: Strategy) -> Facts:
    last = strategy.world_size - 1
    is_zero, is_last = strategy.global_rank == 0, strategy.global_rank == last
    strategy.barrier()
    if is_last:
        time.sleep(0.1)
    came_s = time.monotonic()  # one clock for all processes of a node
    strategy.barrier("a name")
    return {
        "came_s": came_s,
        "passed_s": time.monotonic(),
        "broadcast": strategy.broadcast({"from": strategy.global_rank}),
        "broadcast_last": strategy.broadcast(["from", strategy.global_rank], src=last),
        "broadcast_bad": _raised(lambda: strategy.broadcast(1, src=strategy.world_size)),
        "decisions": {
            "all yes": strategy.reduce_boolean_decision(True),
            "all no": strategy.reduce_boolean_decision(False),
            "zero only, all": strategy.reduce_boolean_decision(is_zero),
            "zero only, any": strategy.reduce_boolean_decision(is_zero, all=False),
            "last only, any": strategy.reduce_boolean_decision(is_last, all=False),
            "none, any": strategy.reduce_boolean_decision(False, all=False),
        },
    }


class Model(nn.Module):
    """A small model with a method beside `forward`, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs

    def step(self, inputs: torch.Tensor, scale: float) -> torch.Tensor:
        loss: torch.Tensor = self(inputs).square().mean() * scale
        return loss


def new_model() -> Model:
    """Return the same model at each call, in any process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


def _modules(strategy: Strategy) -> Facts:
    own = new_model()
    with torch.no_grad():
        own.second.bias.fill_(strategy.global_rank)  # DDP spreads rank 0's
    wrapped = strategy.setup_module(own)
    strategy.call_method(wrapped, "step", torch.ones(2, 4) * (strategy.global_rank + 1), 2.0).backward()
    gradient = own.second.bias.grad
    frozen = nn.Linear(2, 2).requires_grad_(False)
    ready = strategy.setup_module(frozen)
    state = {name: value.clone() for name, value in strategy.get_module_state_dict(wrapped).items()}
    strategy.load_module_state_dict(wrapped, {name: value * 0 for name, value in state.items()})
    return {
        "is_wrapped": isinstance(wrapped, DistributedDataParallel),
        "unwrapped_is_own": strategy.unwrap_module(wrapped) is own,
        "bias": state["second.bias"].tolist(),
        "keys": list(state),
        "own_keys": list(own.state_dict()),
        "loaded": float(own.first.weight.detach().abs().sum()),
        "gradient": None if gradient is None else gradient.tolist(),
        "frozen_is_unwrapped": ready is frozen and strategy.unwrap_module(ready) is frozen,
        "no_sync_of_frozen": _raised(lambda: strategy.no_backward_sync(ready)),
        "no_sync_of_own": _raised(lambda: strategy.no_backward_sync(own)),
        "forward_is_restored": "forward" not in own.__dict__,
    }


def _accumulation(strategy: Strategy) -> Facts:
    wrapped = strategy.setup_module(new_model())
    reduced: list[int] = []

    def count(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    count.__annotations__.clear()  # torch would compare their text with its classes
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, count)
    counts = []
    for microbatch in range(8):
        with strategy.no_backward_sync(wrapped, enabled=(microbatch + 1) % 4 != 0):
            strategy.backward(strategy.call_method(wrapped, "step", torch.ones(1, 4), 1.0))
        counts.append(len(reduced))
    return {"reductions": counts}


def _checkpoints(strategy: Strategy, folder: str) -> Facts:
    path = f"{folder}/state.ckpt"
    strategy.save_checkpoint({"rank": strategy.global_rank, "tensor": torch.arange(3)}, path)
    read = strategy.load_checkpoint(path)
    strategy.barrier()
    return {
        "checkpoint": (read["rank"], read["tensor"].tolist()),
        "bad_checkpoint": _raised(lambda: strategy.save_checkpoint({}, f"{folder}/state.ckpt/below/it")),
    }


def _batch(strategy: Strategy) -> bool:
    batch: Any = {
        "pair": Pair(torch.ones(2), "text"),
        "list": [torch.zeros(1), 3, None],
        "deep": ([{"a": (1,)}],),
    }
    moved = strategy.batch_to_device(batch)
    pair = moved["pair"]
    is_same = torch.equal(pair.left, torch.ones(2)) and pair.right == "text" and type(pair) is Pair
    return is_same and moved["list"][1:] == [3, None] and moved["deep"] == batch["deep"]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(GLOBAL_BATCH, 4, generator=generator), torch.randn(
        GLOBAL_BATCH, 2, generator=generator
    )


def _trained(strategy: Strategy, microbatches: int) -> dict[str, torch.Tensor]:
    wrapped = strategy.setup_module(new_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    strategy.on_after_setup_optimizers([optimizer])
    share = GLOBAL_BATCH // strategy.world_size // microbatches
    for step in range(STEPS):
        inputs, targets = strategy.batch_to_device(data(step))
        optimizer.zero_grad()
        for micro in range(microbatches):
            first = (micro * strategy.world_size + strategy.global_rank) * share
            rows = slice(first, first + share)
            with strategy.no_backward_sync(wrapped, enabled=micro + 1 < microbatches):
                loss = nn.functional.mse_loss(wrapped(inputs[rows]), targets[rows]) / microbatches
                strategy.backward(loss)
        strategy.optimizer_step(optimizer)
    return {name: value.detach().clone() for name, value in strategy.get_module_state_dict(wrapped).items()}


def trained_alone() -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in one process, with plain torch."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = data(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()
