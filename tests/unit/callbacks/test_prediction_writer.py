"""What a prediction writer gets."""

from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import BasePredictionWriter
from rankwise.errors import InvalidArgumentError
from tests.unit.trainer.helpers import Line, loader, trainer


class Noting(BasePredictionWriter):
    """Notes what it gets."""

    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *place: Any
    ) -> None:
        self.batches.append((prediction.tolist(), batch_indices, *place[1:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def written(folder: Path, interval: str, *loaders: Any) -> Noting:
    writer = Noting(interval)

    class Several(Line):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx)

    trainer(folder, callbacks=writer).predict(Several(), loaders[0] if len(loaders) == 1 else list(loaders))
    return writer


def test_batches(tmp_path: Path) -> None:
    """Each batch comes with the positions of its samples, if they are known; no other interval is."""
    writer = written(tmp_path, "batch", loader(4))
    assert writer.batches == [([0, 0.25], [0, 1], 0, 0), ([0.5, 0.75], [2, 3], 1, 0)]
    assert writer.epochs == []
    batches = list(loader(4))
    assert [indices for _, indices, *_ in written(tmp_path, "batch", batches).batches] == [None, None]
    with pytest.raises(InvalidArgumentError):
        Noting("step")


def test_epoch(tmp_path: Path) -> None:
    """All predictions come together, by loader if there are several."""
    writer = written(tmp_path, "epoch", loader(4))
    [(predictions, indices)] = writer.epochs
    assert [each.tolist() for each in predictions] == [[0, 0.25], [0.5, 0.75]]
    assert indices == [[[0, 1], [2, 3]]]
    writer = written(tmp_path, "batch_and_epoch", loader(2), loader(4))
    [(predictions, indices)] = writer.epochs
    assert [len(each) for each in predictions] == [1, 2]
    assert indices == [[[0, 1]], [[0, 1], [2, 3]]]
    assert [place for *_, place in writer.batches] == [0, 1, 1]
