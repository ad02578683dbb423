"""An accumulation window that is cut short: its batches are taken again, none of them is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.callbacks import Callback, LambdaCallback
from rankwise.trainer import Trainer
from tests.helpers.exactness import weights
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, loader, trainer


def cut_after(last: int, path: Path) -> Callback:
    """Return a callback that saves a checkpoint after a batch, and raises then, once."""

    def cut(runs: Trainer, *arguments: Any) -> None:
        if arguments[-1] == last and not path.exists():
            runs.save_checkpoint(path)
            raise InterruptedError

    return LambdaCallback(on_train_batch_end=cut)


def train(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Return a trainer that steps after every third batch."""
    return trainer(folder, callbacks=list(callbacks), **{"accumulate_grad_batches": 3, **options})


def weights_after(train: Trainer, model: Line, path: Path | None = None) -> list[float]:
    """Train on seven batches; return the weights."""
    train.fit(model, loader(14), ckpt_path=path)
    found: list[float] = weights(model).tolist()
    return found


@pytest.mark.parametrize("batch_idx", [0, 1, 3, 4])
def test_checkpoint_from_within_a_window(batch_idx: int, tmp_path: Path) -> None:
    """Resuming goes back to the first batch of the window, whose gradients no checkpoint holds."""
    path, model = tmp_path / "cut.ckpt", Line()
    raises(InterruptedError, None, train(tmp_path, cut_after(batch_idx, path)).fit, Line(), loader(14))
    assert weights_after(train(tmp_path), model, path) == weights_after(train(tmp_path), Line())
    assert model.seen[0] == f"train {batch_idx - batch_idx % 3}"


def test_fit_again_after_an_exception(tmp_path: Path) -> None:
    """The same trainer goes on with the same module, without gradients of the window that was cut short."""
    model, cut = Line(), train(tmp_path, cut_after(4, tmp_path / "cut.ckpt"))
    raises(InterruptedError, None, cut.fit, model, loader(14))
    assert weights_after(cut, model) == weights_after(train(tmp_path), Line())


def test_validation_before_a_window_that_is_repeated(tmp_path: Path) -> None:
    """What ran before the window, a validation too, does not run again."""
    path, model = tmp_path / "cut.ckpt", Line()
    with pytest.raises(InterruptedError):
        train(tmp_path, cut_after(4, path), val_check_interval=3).fit(Line(), loader(14), loader(2))
    train(tmp_path, val_check_interval=3).fit(model, loader(14), loader(2), ckpt_path=path)
    assert "".join(step[0] for step in model.seen) == "tttvt"


def test_going_on_with_longer_windows(tmp_path: Path) -> None:
    """Batches that are in the weights already do not count in the window into which training then falls."""
    path, expected = tmp_path / "cut.ckpt", Line()
    with pytest.raises(InterruptedError):
        train(tmp_path, cut_after(1, path), accumulate_grad_batches=1).fit(expected, loader(14))
    resumed = weights_after(train(tmp_path, max_steps=3), Line(), path)
    third = list(loader(14))[2]
    expected.zero_grad()
    expected.loss(list(third)).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert resumed == weights(expected).tolist()
