"""Two ranks and their workers read in one process's order, and draw random numbers of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

from rankwise import TrainingModule, seed_everything
from tests.helpers.shared import computed_once
from tests.process.training_tasks import trainer_on

SAMPLES, GLOBAL_BATCH, EPOCHS = 16, 4, 2
Ranks = list[dict[str, Any]]
_mark = torch.zeros(())  # in each worker, what its worker_init_fn has set


class Drawing(Dataset[Tensor]):
    """Samples: their number, a random one, the worker that made them, and its mark."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return torch.tensor([float(index), float(torch.rand(())), float(worker), float(_mark)])


class OwnLoader(DataLoader[Any]):
    """A subclass with an argument that no other loader has."""

    def __init__(self, dataset: Any, *, label: str, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.label = label


def mark(worker: int) -> None:
    """Set a worker's mark."""
    _mark.fill_(100 + worker)


def make_loader(world_size: int, num_workers: int, seed: int = 5) -> OwnLoader:
    """Return a loader that draws by weights, from a generator of its own."""
    weights = [1.0 + (number % 3) for number in range(SAMPLES)]
    sampler = WeightedRandomSampler(weights, SAMPLES, generator=torch.Generator().manual_seed(seed))
    workers: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": mark}
    return OwnLoader(
        Drawing(), label="mine", batch_size=GLOBAL_BATCH // world_size, sampler=sampler, **workers
    )


class Reader(TrainingModule):
    """Notes each rank's batches, and what its dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.read: list[Tensor] = []
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        self.first_weights = self.layer.weight.item()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read.append(batch.clone())
        self.drawn.append(float(torch.rand(())))
        loss: Tensor = self.layer(batch[:, :1]).mean()
        return loss

    def on_train_end(self) -> None:
        mine = {"read": torch.stack(self.read), "drawn": self.drawn, "first": self.first_weights}
        self.hparams = {"by_rank": self.trainer.strategy.all_gather_object(mine)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class OwnSeeds(Reader):
    """Makes its loader on each rank, which seeds its generator differently."""

    def train_dataloader(self) -> OwnLoader:
        return make_loader(self.trainer.world_size, 0, seed=6 + self.global_rank)


def fit(world_size: int, num_workers: int, module: Reader | None = None) -> Ranks:
    """Return what each rank has read and drawn."""
    seed_everything(11)
    loader = make_loader(world_size, num_workers) if module is None else None
    module = module or Reader()
    trainer_on(world_size, max_epochs=EPOCHS).fit(module, loader)
    found: Ranks = module.hparams["by_rank"]
    return found


@pytest.fixture
@computed_once
def by_workers() -> dict[int, Ranks]:
    """What two ranks have read, without workers and with two each."""
    return {num_workers: fit(2, num_workers) for num_workers in (0, 2)}


def order(ranks: Ranks) -> Tensor:
    """Return the numbers of the samples that the ranks together read in each step, in order."""
    steps = torch.stack([rank["read"][:, :, 0] for rank in ranks], dim=2)  # step, sample, rank
    return steps.flatten(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_weighted_sampler_is_read_as_by_one_process(num_workers: int, by_workers: dict[int, Ranks]) -> None:
    """A global batch has the samples that one process draws, epoch by epoch, whatever the workers."""
    expected, found = order(fit(1, 0)), order(by_workers[num_workers])
    assert found.shape == (EPOCHS * SAMPLES // GLOBAL_BATCH, GLOBAL_BATCH)
    assert torch.equal(found, expected)
    first, second = expected.view(EPOCHS, -1)
    assert not torch.equal(first, second)


@pytest.mark.quick
def test_the_users_generator_decides_the_order() -> None:
    """Another seed gives another order; where the ranks' seeds differ, rank zero's is used."""
    expected = order(fit(1, 0, OwnSeeds()))
    assert torch.equal(order(fit(2, 0, OwnSeeds())), expected)
    assert not torch.equal(order(fit(1, 0)), expected)


def test_worker_init_fn_runs_in_every_worker(by_workers: dict[int, Ranks]) -> None:
    """The user's `worker_init_fn` runs in both workers of a custom loader class."""
    for rank in by_workers[2]:
        workers, marks = rank["read"][:, 0, 2:].unbind(1)
        assert workers.tolist() == [0.0, 1.0] * (len(workers) // 2)
        assert torch.equal(marks, workers + 100)


def test_random_numbers_are_each_ranks_and_workers_own(by_workers: dict[int, Ranks]) -> None:
    """Augmentation and dropout draw other numbers on each rank, in each worker, in each epoch."""
    for ranks in by_workers.values():
        augmented = torch.cat([rank["read"][:, :, 1].flatten() for rank in ranks])
        assert len(augmented.unique()) == len(augmented) == EPOCHS * SAMPLES
        dropped = [number for rank in ranks for number in rank["drawn"]]
        assert len(set(dropped)) == len(dropped)


def test_the_same_seed_draws_the_same_again(by_workers: dict[int, Ranks]) -> None:
    """Weights to begin with are the same on all ranks; a second run repeats every number of the first."""
    first, second = by_workers[2], fit(2, 2)
    assert len({rank["first"] for rank in (*first, *second)}) == 1
    for mine, again in zip(first, second, strict=True):
        assert torch.equal(mine["read"], again["read"])
        assert mine["drawn"] == again["drawn"]
