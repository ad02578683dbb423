"""Comparison of what the ranks hold by digests: in training, at its end, and before evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError, InvalidArgumentError, RankMismatchError
from rankwise.process_group.rank_facts import digest_of
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import FEATURES, loss_of, net

DATA = TensorDataset(torch.arange(24.0, dtype=torch.float64).reshape(8, FEATURES) / 24)


class Model(TrainingModule):
    """Has parameters, a buffer, and an optimizer with a state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = net(seed)
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", loss_of(self.net, batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Disturb(Callback):
    """Changes a value of rank 1 after the second step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx) != (1, 2):
            return
        with torch.no_grad():
            if self.what == "parameter":
                module.net[0].bias[1] += 1e-15
            elif self.what == "state":
                trainer.optimizers[0].state[module.net[2].weight]["exp_avg"].mul_(2)


def fit(what: str, every: int | None, **arguments: Any) -> list[int]:
    """Fit on two ranks; return after how many steps each has ended."""
    modules = [Model(), Model()]

    def run(rank: int) -> int:
        options: dict[str, Any] = {"max_epochs": 1, "check_ranks_every_n_steps": every}
        strategy = ThreadedStrategy(rank, 2, **arguments)
        trainer = quiet_trainer(strategy, 2, callbacks=[Disturb(what)], **options)
        trainer.fit(modules[rank], DataLoader(DATA, batch_size=1))
        return trainer.global_step

    return run_ranks(2, run)


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("parameter", "the values of parameter 'net.0.bias'"),
        ("state", "the values of parameter 'net.2.weight'"),
    ],
)
def test_a_difference_is_named(what: str, name: str, every: int) -> None:
    """The error names the first parameter that differs, at the next comparison or at the fit's end."""
    with pytest.raises(RankMismatchError) as caught:
        fit(what, every)
    assert next(iter(caught.value.differences)) == name


def test_without_a_difference() -> None:
    """Equal ranks go on."""
    assert fit("nothing", 2) == [4, 4]


@pytest.mark.ranks_may_differ("rank 1 changes a parameter")
def test_not_asked_for() -> None:
    """Without the argument nothing is compared."""
    assert fit("parameter", None) == [4, 4]


def test_impossible_intervals() -> None:
    """An interval is a number of steps; post-local SGD lets models differ between averages."""
    with pytest.raises(InvalidArgumentError, match="check_ranks_every_n_steps"):
        quiet_trainer("ddp_fork", 2, check_ranks_every_n_steps=0)
    with pytest.raises(ConfigurationError, match="post-local SGD"):
        fit("nothing", 2, comm_hook="post_localsgd", model_averaging_period=4)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_evaluation_begins_with_one_model(seeds: tuple[int, int]) -> None:
    """Every rank evaluates rank 0's model."""
    modules = [Model(seed) for seed in seeds]

    def run(rank: int) -> Any:
        trainer = quiet_trainer(ThreadedStrategy(rank, 2), 2)
        trainer.test(modules[rank], DataLoader(DATA, batch_size=1))
        return [each.detach().clone() for each in modules[rank].parameters()]

    for values in run_ranks(2, run):
        torch.testing.assert_close(values, list(net(0).parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_what_ddp_ignores_stays_each_ranks_own(stage: str) -> None:
    """Parameters and buffers that DDP is configured to ignore are neither compared nor shared."""
    modules: list[Any] = [Model(), Model()]

    def run(rank: int) -> Any:
        module = modules[rank]
        module._ddp_params_and_buffers_to_ignore = ["net.0.bias", "mean"]  # torch's way
        own = module.net[0].bias.requires_grad_(False), module.mean
        for value in own:
            value.fill_(rank)
        trainer = quiet_trainer(ThreadedStrategy(rank, 2), 2, max_epochs=1, check_ranks_every_n_steps=1)
        getattr(trainer, stage)(module, DataLoader(DATA, batch_size=1))
        return own

    for rank, own in enumerate(run_ranks(2, run)):
        for value in own:
            torch.testing.assert_close(value, torch.full_like(value, rank), rtol=0, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10),
        torch.arange(10**4).float(),
        torch.tensor(True),
        torch.randn(7, dtype=torch.float64)[1:],
        torch.randn(5, dtype=torch.complex64),
        torch.randn(9).bfloat16()[3:],
        torch.randn(4, 6).t(),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int8),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_digests(tensor: Tensor) -> None:
    """A digest depends on the values, their order, dtype and shape, and on nothing else."""
    digest = digest_of(tensor)
    assert digest_of(tensor.clone(memory_format=torch.contiguous_format)) == digest
    for place in (0, -1):
        other = tensor.clone().flatten()
        other[place] = ~other[place] if tensor.dtype is torch.bool else other[place] + 1
        assert digest_of(other.view(tensor.shape)) != digest
    assert digest_of(tensor.reshape(1, *tensor.shape)) != digest
    if tensor.numel() > 1:
        assert digest_of(tensor.flatten().flip(0).view(tensor.shape)) != digest


def test_digests_of_few_bits() -> None:
    """Zeros have digests that tell their number and dtype; a change of order shows across rows."""
    assert digest_of(torch.zeros(0)) != digest_of(torch.zeros(1)) != digest_of(torch.zeros(1).double())
    values = torch.randn(10**4)
    swapped = values.clone()
    swapped[[17, 9000]] = swapped[[9000, 17]]
    assert digest_of(swapped) != digest_of(values)
    assert digest_of(nn.Parameter(values)) == digest_of(values)
