"""Hooks of the module on two ranks: they agree to end an epoch, and overridden hooks change no weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.parameters import first
from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer


class EndsOnOneRank(Regression):
    """Rank 1 ends each epoch before its batch `at`; all losses have the same weight."""

    batches: Tensor

    def __init__(self, at: int, weight: float | None = None) -> None:
        super().__init__()
        self.at, self.weight, self.count = at, weight, 0
        self.register_buffer("batches", torch.zeros(2, dtype=torch.long))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.at and self.global_rank == 1 else None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        if self.weight is not None:
            self.log_weight(self.weight)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.batches.copy_(self.trainer.strategy.all_gather(torch.tensor(self.count)).flatten())


@pytest.mark.parametrize(
    ("at", "window", "options"),
    [(2, 1, {}), (3, 2, {}), (3, 2, {"gradient_weighting": "logged"})],
    ids=["batch", "window", "weights"],
)
def test_one_rank_ends_the_epoch(at: int, window: int, options: dict[str, Any]) -> None:
    """-1 on one rank ends it on both before the same batch; an unfinished window leaves nothing behind."""
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": window}
    expected = Regression()
    quiet_trainer("single_device", 1, limit_train_batches=2, **settings).fit(expected, loader(40, 8))
    model = EndsOnOneRank(at, 3.0 if options else None)
    trainer = quiet_trainer(ddp("fork", **options), 2, **settings)
    trainer.fit(model, loader(40, 4))
    assert model.batches.tolist() == [2 * at, 2 * at]
    assert (trainer.current_epoch, trainer.global_step) == (2, 4 // window)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-12)


class Plain(Regression):
    """Uses a spare layer, if it has one, in some of the accumulation windows."""

    def __init__(self, *, has_spare: bool) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1).double() if has_spare else None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.spare is None or batch_idx % 4:
            return loss
        more: Tensor = loss + self.spare(loss.reshape(1)).sum()
        return more

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Hooked(Plain):
    """Defines every hook of the optimisation, and does in it what the Trainer does."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [tensor.to(device) for tensor in batch]


@pytest.mark.parametrize(
    "options", first(1, [{}, {"find_unused_parameters": True}, {"sync_mode": "forced_sync"}]), ids=str
)
def test_hooks_that_do_what_the_trainer_does(options: dict[str, Any]) -> None:
    """With windows, clipping and a rank that has fewer batches: the same weights, bit by bit."""
    has_spare = "find_unused_parameters" in options
    models = [Plain(has_spare=has_spare), Hooked(has_spare=has_spare)]
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    for model in models:
        trainer = quiet_trainer(ddp("fork", **options), 2, uneven_inputs="join", **settings)
        trainer.fit(model, loader(36, 4))
        assert trainer.global_step == 6
    for plain, hooked in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(plain, hooked)
