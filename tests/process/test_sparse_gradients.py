"""Sparse gradients, of `nn.Embedding(sparse=True)`, on two real processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import ConfigurationError, WorkerRaisedError
from tests.process.helpers import ddp
from tests.process.training_tasks import quiet_trainer, step_by_hand

ROWS, BATCH = 10, 3
POWERSGD = "powersgd:start_powerSGD_iter=2,matrix_approximation_rank=4"


class Embedded(TrainingModule):
    """Regression on embeddings, whose last parameter, in DDP's first bucket, has sparse gradients too."""

    def __init__(self, is_sparse: bool = True, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Embedding(ROWS, 4, sparse=is_sparse).double()
        self.hidden = nn.Linear(4, 4).double()
        self.last = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=is_sparse).double()
        self.automatic_optimization = not is_manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        numbers, targets = batch
        prediction = self.hidden(self.first(numbers)) + self.last(numbers.unsqueeze(1))
        loss: Tensor = (prediction.sum(dim=1) - targets).square().mean()
        if self.automatic_optimization:
            if self.trainer.strategy.gradient_weighting == "logged":
                self.log_weight(len(numbers))
            return loss
        step_by_hand(self, loss)
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def samples(bad: int | None = None) -> TensorDataset:
    """Return samples of which two ranks have one batch of each size; `bad` is the number of one with NaN."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, ROWS, (28,), generator=generator)
    targets = torch.randn(28, dtype=torch.float64, generator=generator)
    if bad is not None:
        targets[bad] = float("nan")
    return TensorDataset(numbers, targets)


def weights(
    module: Embedded,
    strategy: Any = "single_device",
    devices: int = 1,
    bad: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return the weights after two epochs of global batches of the same samples."""
    trainer = quiet_trainer(strategy, devices, max_epochs=2, **options)
    trainer.fit(module, DataLoader(samples(bad), batch_size=2 * BATCH // devices))
    return [parameter.detach() for parameter in module.parameters()]


def check_equal(own: list[Tensor], bad: int | None = None, atol: float = 1e-12, **options: Any) -> None:
    """The weights are those of one process with dense gradients, on the batches of both ranks."""
    expected = weights(Embedded(is_sparse=False), bad=bad, **options)
    torch.testing.assert_close(own, expected, rtol=0, atol=atol)


CLIPPED = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found no unused")
@pytest.mark.parametrize(
    ("weighting", "options", "trainer_options", "atol"),
    [
        ("samples", {}, {}, 1e-12),
        ("logged", {}, {"gradient_clip_val": 0.3}, 1e-12),
        pytest.param("logged", {"find_unused_parameters": True}, CLIPPED, 1e-12, marks=pytest.mark.quick),
        ("logged", {"comm_hook": "fp16_compress"}, {}, 1e-2),
        ("samples", {"comm_hook": "bf16_compress"}, {"on_nonfinite": "skip"}, 1e-1),
        ("samples", {"comm_hook": "allreduce", "comm_wrapper": "fp16"}, {}, 1e-2),
        pytest.param("samples", {"comm_hook": POWERSGD}, {}, 1e-12, marks=pytest.mark.quick),
    ],
)
def test_ranks_equal_one_process(
    weighting: str, options: dict[str, Any], trainer_options: dict[str, Any], atol: float
) -> None:
    """Hooks, weights, clipping and skipped steps: the weights of one process with dense gradients."""
    bad = 20 if "on_nonfinite" in trainer_options else None
    strategy = ddp("fork", gradient_weighting=weighting, **options)
    check_equal(weights(Embedded(), strategy, 2, bad, **trainer_options), bad, atol, **trainer_options)


@pytest.mark.parametrize("number", [1, 2])
def test_one_process_too(number: int) -> None:
    """Clipping and skipping do not need several ranks; manual optimisation has no gradients to average."""
    for algorithm in ("norm", "value"):
        options: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
        options |= {"on_nonfinite": "skip", "accumulate_grad_batches": number}
        check_equal(weights(Embedded(), bad=20, **options), 20, **options)
    check_equal(weights(Embedded(is_manual=True)))


@pytest.mark.parametrize(
    ("options", "module", "words"),
    [
        ({"sync_mode": "forced_sync"}, Embedded(), "forced_sync.* sparse gradients"),
        ({}, Embedded(is_manual=True), "manual optimisation.* sparse gradients"),
    ],
)
def test_refused_before_anything_starts(options: dict[str, Any], module: Embedded, words: str) -> None:
    """Where rankwise averages itself, in dense buckets, the layers are named in the caller."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        weights(module, ddp("fork", **options), 2)
    assert "first, last" in str(caught.value)


class MadeInSetup(Embedded):
    """Makes its layers on the ranks."""

    def setup(self, stage: str) -> None:
        self.first = nn.Embedding(ROWS, 4, sparse=True).double()

    def __init__(self, *, is_manual: bool) -> None:
        super().__init__(is_sparse=False, is_manual=is_manual)


@pytest.mark.parametrize("is_manual", [True, False])
def test_refused_on_every_rank(is_manual: bool) -> None:
    """Layers that exist on the ranks only are refused before the first step."""
    strategy = ddp("fork", sync_mode="auto" if is_manual else "forced_sync")
    with pytest.raises(WorkerRaisedError, match=r"sparse gradients[\s\S]*the same on global_rank") as caught:
        weights(MadeInSetup(is_manual=is_manual), strategy, 2)
    assert caught.value.exception_type == ConfigurationError.__name__
