"""What is logged, and how it is reduced over batches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from rankwise.errors import ConfigurationError, InvalidTypeError, LifecycleError, UnknownNameError
from rankwise.strategies import SingleDeviceStrategy, Strategy
from rankwise.trainer.metrics import Results, batch_size_of, computed, is_metric_object
from tests.unit.trainer.helpers import Line, loader, trainer, with_second_rank


@pytest.fixture
def alone() -> Strategy:
    """A strategy with one rank."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.bind()
    return strategy


def epoch(results: Results, strategy: Strategy) -> dict[str, float]:
    return {value.name: value.value.item() for value in results.epoch_values(strategy)}


def logged(*batches: tuple[int, float], is_evaluation: bool = True, **options: Any) -> Results:
    """Return results with one value logged for each (batch size, value)."""
    results = Results(is_evaluation=is_evaluation)
    for size, value in batches:
        results.begin_batch(torch.zeros(size))
        results.log("x", value, **options)
        results.end_batch()
    return results


def test_mean_is_weighted(alone: Strategy) -> None:
    """The mean weighs by batch size, found in the batch or given."""
    assert epoch(logged((3, 1.0), (1, 5.0)), alone) == {"x": 2.0}
    assert epoch(logged((3, 1.0), (1, 5.0), batch_size=1), alone) == {"x": 3.0}


@pytest.mark.parametrize(("function", "name"), [(torch.mean, "mean"), (torch.sum, "sum"), (max, "max")])
def test_functions_name_reductions(function: Any, name: str) -> None:
    """A function of torch's or Python's stands for the reduction that has its name; others are refused."""
    results = Results(is_evaluation=False)
    results.log("x", 1.0, on_epoch=True, reduce_fx=function)
    assert results.state_dict()["x"]["reduce_fx"] == name
    with pytest.raises(UnknownNameError, match="median"):
        results.log("y", 1.0, reduce_fx=torch.median)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 4.0), ("sum", 14.0), ("min", 1.0), ("max", 7.0)]
)
def test_over_ranks(reduce_fx: str, expected: float) -> None:
    """Evaluation reduces over all ranks; each sample counts once in a mean."""
    other = logged((2, 7.0), reduce_fx=reduce_fx)
    parts = {name: metric.part() for name, metric in other._metrics.items()}
    mine = logged((1, 1.0), (1, 1.0), *([(2, 5.0)] if reduce_fx == "sum" else []), reduce_fx=reduce_fx)
    assert epoch(mine, with_second_rank(lambda _: (True, parts))) == {"x": expected}


def test_rank_without_batches() -> None:
    """A rank whose shard was empty takes part without having logged anything."""
    assert epoch(logged((2, 3.0)), with_second_rank(lambda _: (False, {}))) == {"x": 3.0}
    parts = {name: metric.part() for name, metric in logged((2, 3.0))._metrics.items()}
    assert epoch(Results(is_evaluation=True), with_second_rank(lambda _: (True, parts))) == {"x": 3.0}


def test_different_names() -> None:
    """Ranks that log different metrics get an error that names them."""
    with pytest.raises(ConfigurationError, match=r"not all logged \['x'\](.|\n)*'x' on global_rank 0 only"):
        logged((2, 3.0)).epoch_values(with_second_rank(lambda _: (True, {})))


def test_training_is_local_by_default() -> None:
    """In training only sync_dist=True reduces over the ranks."""
    local = logged((1, 3.0), is_evaluation=False, on_epoch=True)
    assert epoch(local, with_second_rank(lambda _: (True, {}))) == {"x_epoch": 3.0}
    synced = logged((1, 3.0), is_evaluation=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
    assert epoch(synced, with_second_rank(lambda mine: mine)) == {"x_epoch": 6.0}


def test_step_values(alone: Strategy) -> None:
    """A training step's values come once, and not again until they are logged again."""
    results = logged((1, 3.0), is_evaluation=False)
    assert [(value.name, value.value.item()) for value in results.step_values(alone, is_synced=True)] == [
        ("x", 3.0)
    ]
    assert results.step_values(alone, is_synced=True) == []
    assert results.epoch_values(alone) == []


def test_step_values_over_ranks() -> None:
    """A step's value is reduced over the ranks when it is logged, and is this rank's own before."""
    for is_synced, expected in ((True, 5.0), (False, 3.0)):
        results = logged((1, 3.0), is_evaluation=False, sync_dist=True)
        other = with_second_rank(lambda mine: (True, {"x": mine[1]["x"]._replace(total=7.0)}))
        [value] = results.step_values(other, is_synced=is_synced)
        assert value.value.item() == expected


def test_names_of_both(tmp_path: Path) -> None:
    """What is logged by step and by epoch has a name for each, and its own for the latest."""

    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"number": float(batch_idx)}, on_epoch=True, prog_bar=True)
            return self.loss(batch)

    train = trainer(tmp_path)
    train.fit(Both(), loader())
    metrics = {name: value.item() for name, value in train.callback_metrics.items()}
    assert metrics == {"number": 1.5, "number_step": 3.0, "number_epoch": 1.5}
    assert train.progress_bar_metrics == {"number_step": 3.0, "number_epoch": 1.5}


def test_loggers_get_every_nth_step(tmp_path: Path) -> None:
    """Loggers get the metrics of every n-th step, and those of each epoch."""
    train = trainer(tmp_path, logger=True, log_every_n_steps=2)
    train.fit(Line(), loader(), loader(2))
    lines = (tmp_path / "rankwise_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "epoch,loss,step,val_loss"
    assert [line.split(",")[2] for line in lines[1:]] == ["2", "4", "4"]
    assert set(train.logged_metrics) == {"loss", "val_loss"}


@pytest.mark.parametrize("value", ["high", torch.zeros(2), None])
def test_no_number(value: Any) -> None:
    """Only numbers can be logged."""
    with pytest.raises(InvalidTypeError, match="log\\('x'\\) value"):
        Results(is_evaluation=True).log("x", value)


def test_unknown_reduction() -> None:
    """An unknown reduction is refused, and the nearest one suggested."""
    with pytest.raises(UnknownNameError, match="Did you mean 'mean'"):
        Results(is_evaluation=True).log("x", 1.0, reduce_fx="meen")


def test_logging_outside_a_loop(tmp_path: Path) -> None:
    """Logging where no loop runs is an error that says where it can be done."""

    class Early(Line):
        def setup(self, stage: str) -> None:
            self.log("early", 1.0)

    with pytest.raises(LifecycleError, match="between on_train_start and on_train_end"):
        trainer(tmp_path).fit(Early(), loader())


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(4), torch.zeros(5)], 4),
        ({"name": "x", "data": (torch.zeros(2),)}, 2),
        (["a", "b", "c"], 3),
        ("text", 1),
        (None, 1),
    ],
)
def test_batch_size(batch: Any, size: int) -> None:
    """The size is the first dimension of the first tensor; without tensors, the length of a list."""
    assert batch_size_of(batch) == size


# ------------------------------------------------------------------------ metric objects of torchmetrics


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
