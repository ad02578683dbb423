"""Parameters that are frozen, unfrozen or added within a fit, on real processes."""

from typing import Any

import pytest
import torch
from torch import nn

from rankwise import DDPStrategy
from rankwise.callbacks import Callback
from rankwise.errors import WorkerRaisedError
from tests.helpers.parameters import first
from tests.process.training_tasks import Regression, loader, quiet_trainer


class FineTuned(Regression):
    """The first layer is frozen, and the optimizer does not have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = self.net.get_submodule("0")
        self.first.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=0.01)


class Change(Callback):
    """Changes what is trained before the third batch of the second epoch, on some ranks."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != (1, 2) or trainer.global_rank not in self.ranks:
            return
        if "unfreeze" in self.what:
            module.first.requires_grad_(True)
        if self.what == "freeze":
            module.net[2].bias.requires_grad_(False)
        if self.what == "buffer":
            module.register_buffer("mean", batch[0].mean(0))
        if "group" in self.what:
            added = module.first.parameters() if "unfreeze" in self.what else nn.Parameter(torch.ones(2))
            trainer.optimizers[0].add_param_group({"params": added, "lr": 0.05})


def fit(strategy: Any, world_size: int, what: str, *ranks: int) -> tuple[Any, FineTuned]:
    """Fit three epochs; return the trainer and the module."""
    module = FineTuned()
    trainer = quiet_trainer(strategy, world_size, max_epochs=3, callbacks=Change(what, ranks))
    trainer.fit(module, loader(32, 8 // world_size))
    return trainer, module


@pytest.mark.parametrize("start_method", first(1, ["fork", "forkserver", "spawn"]))
def test_a_layer_that_is_unfrozen_with_a_group(start_method: str) -> None:
    """Two ranks have one process's weights, and the caller's optimizer has both groups and their states."""
    alone, expected = fit("single_device", 1, "unfreeze with a group", 0)
    trainer, module = fit(DDPStrategy(start_method=start_method), 2, "unfreeze with a group", 0, 1)
    own, wanted = list(module.parameters()), list(expected.parameters())
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
    [optimizer], [single] = trainer.optimizers, alone.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
    assert len(optimizer.state) == len(single.state) == 4


@pytest.mark.quick
@pytest.mark.parametrize(("what", "rank"), [("unfreeze", 1), ("freeze", 0), ("group", 1), ("buffer", 0)])
def test_a_rank_that_changes_alone(what: str, rank: int) -> None:
    """All ranks end with one error, which names what it is, long before a collective times out."""
    with pytest.raises(WorkerRaisedError, match="RankMismatchError: The ranks are not the same") as caught:
        fit(DDPStrategy(start_method="fork"), 2, what, rank)
    assert f"on global_rank={rank}" in str(caught.value).replace("global_rank ", "global_rank=")
