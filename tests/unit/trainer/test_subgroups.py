"""Ranks that share data and gradients with some others only, and their checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import NonFiniteLossError
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import alone, assert_close, batch, gradients, loss_of, net


class Pairs(ThreadedStrategy):
    """The even ranks are one group, the odd ones another."""

    _pair: dist.ProcessGroup | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self._pair = groups[self.global_rank % 2]

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._pair


class Fit(TrainingModule):
    """Logs which rank it is; the loss of some ranks may be NaN."""

    def __init__(self, spoilt: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = net()
        self.spoilt = spoilt
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rank", float(self.global_rank))
        factor = float("nan") if self.global_rank in self.spoilt else 1.0 + self.global_rank
        return loss_of(self.net, batch[0]) * factor

    def on_fit_start(self) -> None:
        self.found["metrics"] = dict(self.trainer.callback_metrics)
        self.found["hooks"] = self.trainer.strategy.gradients.own_states()

    def on_train_end(self) -> None:
        self.found["at the end"] = self.trainer.strategy.gradients.own_states()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(path: Path, *, ckpt_path: Path | None = None, spoilt: tuple[int, ...] = (), **options: Any) -> Any:
    """Fit on four ranks, and save a checkpoint; return what each rank has found."""
    modules = [Fit(spoilt) for _ in range(4)]
    loader = DataLoader(TensorDataset(batch(9, 9, 8)), batch_size=1)

    def run(rank: int) -> dict[str, Any]:
        hook = "powersgd:start_powerSGD_iter=2,min_compression_rate=1" if not options else None
        trainer = quiet_trainer(Pairs(rank, 4, comm_hook=hook), 4, max_epochs=1, **options)
        modules[rank].on_train_epoch_end = lambda: trainer.save_checkpoint(path)  # type: ignore[method-assign]
        try:
            trainer.fit(modules[rank], loader, ckpt_path=ckpt_path)
        except NonFiniteLossError as error:
            modules[rank].found["error"] = error.global_ranks
        return modules[rank].found

    return run_ranks(4, run)


def test_a_checkpoint_has_a_part_for_each_rank(tmp_path: Path) -> None:
    """Random state and metrics of all four, and what their hooks remember; each gets its own back."""
    before = fit(tmp_path / "a.ckpt")
    states = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert [float(state["metrics"]["callback_metrics"]["rank"]) for state in states["ranks"]] == [0, 1, 2, 3]
    after = fit(tmp_path / "b.ckpt", ckpt_path=tmp_path / "a.ckpt")
    assert [float(found["metrics"]["rank"]) for found in after] == [0, 1, 2, 3]
    errors = [found["at the end"][0]["errors"] for found in before]
    for [resumed], expected in zip([found["hooks"] for found in after], errors, strict=True):
        for name, error in expected.items():
            assert torch.equal(resumed["errors"][name], error)
    name = "net.0.weight"
    assert len({error[name].sum().item() for error in errors}) == 4


def test_nonfinite_losses_of_another_group(tmp_path: Path) -> None:
    """Every rank says whose loss it was."""
    found = fit(tmp_path / "a.ckpt", spoilt=(3,), on_nonfinite="raise")
    assert [of_rank["error"] for of_rank in found] == [(3,)] * 4


def test_forced_sync_of_a_module_that_is_not_wrapped() -> None:
    """Its gradients are averaged over the ranks that share data, not over all."""
    modules = [net().requires_grad_(False) for _ in range(4)]  # nothing to train, so it is not wrapped

    def run(rank: int) -> list[Tensor | None]:
        def step(strategy: Pairs) -> list[Tensor | None]:
            plain = strategy.setup_module(modules[rank])
            plain.requires_grad_(True)
            with strategy.gradient_sync_context(plain):
                loss_of(plain, batch(rank)).backward()
            return gradients(plain)

        return Pairs(rank, 4, sync_mode="forced_sync").launch(step)

    for rank, found in enumerate(run_ranks(4, run)):
        assert_close(found, alone(net(), [batch(rank % 2), batch(rank % 2 + 2)]))
