"""Metric objects of torchmetrics, without any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from rankwise.errors import ConfigurationError
from rankwise.trainer.metrics import computed, is_metric_object
from tests.unit.trainer.helpers import Line, loader, trainer


def metrics(kind: Any, parts: list[Any]) -> list[Any]:
    """Return a metric for each part, updated with it where it is not None."""
    made = [kind() for _ in parts]
    for metric, part in zip(made, parts, strict=True):
        if part is not None:
            metric.update(torch.tensor(part))
    return made


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torchmetrics.SumMetric, 6.0),
        (torchmetrics.MeanMetric, 2.0),
        (torchmetrics.MaxMetric, 3.0),
        (torchmetrics.CatMetric, [1.0, 2.0, 3.0]),
    ],
)
def test_states_are_reduced(kind: Any, expected: Any) -> None:
    """Every kind of state is reduced over copies; one that has seen nothing adds nothing."""
    copies = metrics(kind, [[1.0, 2.0], None, [3.0]])
    assert computed(copies).tolist() == expected
    assert copies[0].update_count == 1  # the copies are left as they are


def test_nothing_seen() -> None:
    """A metric that no rank has updated has the value that it begins with."""
    assert computed(metrics(torchmetrics.SumMetric, [None, None])) == 0


def test_what_is_a_metric_object() -> None:
    """Numbers and tensors are none."""
    assert is_metric_object(torchmetrics.SumMetric())
    assert not is_metric_object(torch.ones(1))


class WithObject(Line):
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total.update(batch[0][:, 1].sum())
        self.log("total", self.total, **self.options)
        return super().training_step(batch, batch_idx)


def test_training_epochs_start_anew(tmp_path: Path) -> None:
    """A metric object that is logged in training is computed at the epoch's end, then reset."""
    train, model = trainer(tmp_path, max_epochs=2), WithObject()
    train.fit(model, loader(8))
    assert train.callback_metrics["total"] == 8 * 1 / 8
    assert model.total.update_count == 0


@pytest.mark.parametrize("options", [{"on_step": True}, {"on_epoch": False}])
def test_metric_objects_are_logged_by_epoch(options: dict[str, Any], tmp_path: Path) -> None:
    """By step a metric object has no value of its own; the error says what to log."""
    model = WithObject()
    model.options = options
    with pytest.raises(ConfigurationError, match="computed once for the whole epoch"):
        trainer(tmp_path).fit(model, loader())
