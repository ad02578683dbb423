"""The lines of docs/migrating for a launched function run on two ranks."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from rankwise.errors import LifecycleError
from tests.docs.test_migrating import CODE, NAMES
from tests.helpers.threaded import ThreadedStrategy, run_ranks

NOT_RUN = {
    "strategy.launch(function)": "it is what launches",
    "strategy.bind(devices=2)": "before a launch",
    "strategy.environment.main_port": "only where what started the job has a port",
    "strategy.setup_module(torch.compile(model))": "takes seconds",
}
"""Why these lines are left out."""

ON_A_STRATEGY = re.compile(r"^((with|own =|out =) )?(items\[)?(strategy\.|gradient_sync_context)")
MADE_AND_CALLED = re.compile(r"^\w*Strategy\(.*\)\.(?!launch\()")
FUNCTIONS = re.compile(
    r"^(all_|broadcast|gather_all|sync_ddp|shard_for_|register_ddp_comm_hook|ShardedSampler)"
)
LINES = [
    code
    for code in CODE
    if code not in NOT_RUN and any(kind.match(code) for kind in (ON_A_STRATEGY, MADE_AND_CALLED, FUNCTIONS))
]
HOLDING_BACK = [code for code in LINES if "no_backward_sync(" in code or "gradient_sync_context(" in code]


class Net(nn.Module):
    """A model with methods beside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y

    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.forward(batch).sum()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss


def summed(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Average nothing: a communication hook."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


summed.__annotations__.clear()  # torch compares them with types, and these are strings


def readers(strategy: ThreadedStrategy, path: Path) -> dict[str, Any]:
    """Return what the reader has, on one rank, made anew for each line."""
    model = Net()
    model.head.weight.grad = torch.zeros(1, 2)
    wrapped = strategy.setup_module(model)
    batch = torch.full((1, 2), strategy.global_rank + 1.0)
    tensor = torch.ones(2)
    data: Any = list(range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = NAMES | dict.fromkeys(("x", "tensor", "result", "output"), tensor)
    names |= {name: [1] for name in ("obj", "objects", "checkpoint")}
    names |= {"strategy": strategy, "module": Net(), "model": Net(), "wrapped": wrapped, "path": path}
    names |= {"optimizer": optimizer, "optimizers": [optimizer], "state": model.state_dict()}
    names |= {"batch": batch, "batch_idx": 0, "loss_of": loss_of, "is_final_microbatch": False}
    names |= {"loader": DataLoader(data, 2), "sampler": SequentialSampler(data), "items": [1, 2, 3]}
    return names | {"hook": summed, "decision": True, "precision_state": {}, "group": None, "nothing": None}


OWN = {
    "strategy.precision.load_state_dict(state)": {"state": "precision_state"},
    "register_ddp_comm_hook(model, state, hook)": {"model": "wrapped", "state": "nothing"},
}
"""What is something else in a line than in the others."""


def run_lines(codes: list[str], path: Path) -> list[dict[str, Tensor | Exception]]:
    """Run each line on two ranks; return, for each rank, the gradients that it left, or what it raised."""

    def launched(strategy: ThreadedStrategy) -> dict[str, Tensor | Exception]:
        found: dict[str, Tensor | Exception] = {}
        for code in codes:
            names = readers(strategy, path)
            names |= {name: names[other] for name, other in OWN.get(code, {}).items()}
            if re.search(r"\bloss\b", code):  # a forward pass more, outside of what the line does
                names["loss"] = loss_of(names["wrapped"], names["batch"])
            try:
                exec(code, names)
                model: Any = strategy.unwrap_module(names["wrapped"])
                found[code] = model.head.weight.grad
            except Exception as error:
                found[code] = error
        return found

    return run_ranks(2, lambda rank: ThreadedStrategy(rank, 2).launch(launched))


def test_most_lines_are_run() -> None:
    """They are found, and what is not run is there."""
    assert len(LINES) > 60
    assert set(NOT_RUN) <= set(CODE)
    assert len(HOLDING_BACK) >= 4


def test_lines_run(tmp_path: Path) -> None:
    """Each line runs with the values of the page, and blocks that suspend reductions do so."""
    torch.save({}, tmp_path / "checkpoint")
    first, second = run_lines(LINES, tmp_path / "checkpoint")
    raised = {code: found for code, found in first.items() if isinstance(found, Exception)}
    assert raised == {}
    averaged = [code for code in HOLDING_BACK if torch.equal(first[code], second[code])]  # type: ignore[arg-type]  # tensors
    assert averaged == []


def test_a_wrong_line_is_found(tmp_path: Path) -> None:
    """A line at the wrong moment raises; a block without its forward pass suspends nothing."""
    too_early = "DDPStrategy(find_unused_parameters=True).setup_module(model)"
    without_forward = "with strategy.no_backward_sync(wrapped): strategy.backward(loss)"
    first, second = run_lines([too_early, without_forward], tmp_path)
    assert isinstance(first[too_early], LifecycleError)
    assert torch.equal(first[without_forward], second[without_forward])  # type: ignore[arg-type]  # tensors
