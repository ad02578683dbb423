"""What is logged, and how it is reduced over batches and ranks."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rankwise.callbacks import LambdaCallback
from rankwise.errors import ConfigurationError, InvalidTypeError, LifecycleError
from rankwise.strategies import SingleDeviceStrategy, Strategy
from rankwise.trainer import Trainer
from rankwise.trainer.metrics.metric_objects import is_metric_object, merged_states, metric_objects, states_of
from rankwise.trainer.metrics.results import Results
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import (
    Line,
    Recording,
    fitted,
    loader,
    saving_each_step,
    trainer,
    with_second_rank,
)


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
    results = Results(nn.Module(), is_evaluation=is_evaluation)
    for size, value in batches:
        results.begin_batch(size)
        results.log("x", value, **options)
        results.end_batch()
    return results


def with_other(results: Results | None) -> Strategy:
    """Return a strategy whose other rank has these results, or has logged nothing."""
    parts = {} if results is None else {name: each.part() for name, each in results._metrics.items()}
    return with_second_rank(lambda _: (results is not None, parts, {}, False))


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_bits_of_an_epoch(reduce_fx: str, is_resumed: bool, alone: Strategy) -> None:
    """Values are added in double precision, in their order, also where a run continues within the epoch."""
    values = [torch.tensor(number, dtype=torch.float32) / 7 for number in range(1, 10)]
    numbers, sizes = [value.item() / 3 for value in values], [3, 7, 1, 5, 9, 2, 8, 6, 4]
    results, total = Results(nn.Module(), is_evaluation=True), 0.0
    for place, (value, number, size) in enumerate(zip(values, numbers, sizes, strict=True)):
        if is_resumed and place == 4:
            state, results = results.state_dict(), Results(nn.Module(), is_evaluation=True)
            results.add_state_dict(state)
        results.log("x", number, reduce_fx=reduce_fx, batch_size=size)
        as_tensor: Any = torch.tensor(size)
        results.log("of tensors", value, reduce_fx=reduce_fx, batch_size=as_tensor)
        total += number * size
    pairs = zip(values, sizes, strict=True)
    of_tensors = sum((value.double() * size for value, size in pairs), torch.tensor(0.0).double())
    expected = {
        "mean": (total / sum(sizes), of_tensors.item() / sum(sizes)),
        "sum": (sum(numbers), sum(value.item() for value in values)),
        "min": (numbers[0], values[0].item()),
        "max": (numbers[-1], values[-1].item()),
    }
    assert tuple(epoch(results, alone).values()) == expected[reduce_fx]


def test_operations_of_a_logged_number() -> None:
    """A number of the CPU takes two operations of torch: they copy it in double precision."""
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    results, loss = Results(nn.Module(), is_evaluation=False), torch.ones((), requires_grad=True) * 2
    results.begin_batch(32)
    with Noting():  # type: ignore[no-untyped-call]  # of torch
        results.log("x", loss, on_epoch=True)
    assert len([name for name in seen if "_local_scalar_dense" not in name]) == 2, seen


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 4.0), ("sum", 14.0), ("min", 1.0), ("max", 7.0)]
)
def test_over_ranks(reduce_fx: str, expected: float) -> None:
    """Evaluation reduces over all ranks, also if one has no batch; each sample counts once in a mean."""
    mine = logged((1, 1.0), (1, 1.0), *([(2, 5.0)] if reduce_fx == "sum" else []), reduce_fx=reduce_fx)
    assert epoch(mine, with_other(logged((2, 7.0), reduce_fx=reduce_fx))) == {"x": expected}
    assert epoch(logged((2, 3.0)), with_other(None)) == {"x": 3.0}
    assert epoch(logged(), with_other(logged((2, 3.0)))) == {"x": 3.0}


def test_values_of_an_epoch(alone: Strategy) -> None:
    """A mean weighs by batch size; a hook reads what was logged so far, and what it logs itself counts."""
    assert epoch(logged((3, 1.0), (1, 5.0), batch_size=1), alone) == {"x": 3.0}
    results = logged((3, 1.0), (1, 5.0))
    [shown] = results.values_so_far(alone, is_read=True)
    assert (shown.name, shown.value.item()) == ("x", 2.0)
    results.log("late", 3.0)
    assert epoch(results, alone) == {"x": 2.0, "late": 3.0}


@pytest.mark.parametrize(("is_read_here", "is_read_there", "exchanges"), [(0, 0, 1), (1, 0, 2), (0, 1, 2)])
def test_exchanges_of_an_epoch(is_read_here: bool, is_read_there: bool, exchanges: int) -> None:
    """All ranks exchange the values once more at the end if any of them has a hook that may log."""
    seen = []

    def other(mine: Any) -> Any:
        seen.append(mine)
        return (True, mine[1], {}, bool(is_read_there))

    results, strategy = logged((2, 3.0)), with_second_rank(other)
    results.values_so_far(strategy, is_read=bool(is_read_here))
    assert epoch(results, strategy) == {"x": 3.0}
    assert len(seen) == exchanges


class Numbered(Line):
    """Logs the number of the batch by step and by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"number": float(batch_idx)}, on_epoch=True, prog_bar=True)
        return self.loss(batch)


def test_hooks_read_the_metrics_of_their_step(tmp_path: Path) -> None:
    """After a batch, hooks read what was logged in its step, also before the end of an accumulation."""
    read: list[list[float]] = []

    def note(runs: Trainer, *_: Any) -> None:
        read.append([runs.callback_metrics[name].item() for name in ("number", "number_step")])

    noting = LambdaCallback(on_train_batch_end=note)
    fitted(tmp_path, Numbered(), callbacks=noting, accumulate_grad_batches=2)
    assert read == [[number, number] for number in range(4)]


def test_different_names() -> None:
    """Ranks that log different metrics get an error that names them."""
    with pytest.raises(ConfigurationError, match=r"not all logged \['x'\](.|\n)*'x' on global_rank 0 only"):
        logged((2, 3.0)).epoch_values(with_other(logged()))


def test_training_is_local_by_default() -> None:
    """In training only sync_dist=True reduces over the ranks."""
    local = logged((1, 3.0), is_evaluation=False, on_epoch=True)
    assert epoch(local, with_other(logged())) == {"x_epoch": 3.0}
    synced = logged((1, 3.0), is_evaluation=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
    assert epoch(synced, with_second_rank(lambda mine: mine)) == {"x_epoch": 6.0}


def test_step_values(alone: Strategy) -> None:
    """A training step's values come once, and not again until they are logged again."""
    results = logged((1, 3.0), is_evaluation=False)
    [value] = results.step_values(alone, is_checked=True)
    assert (value.name, value.value.item()) == ("x", 3.0)
    assert results.step_values(alone, is_checked=True) == []
    assert results.epoch_values(alone) == []


def other_part(mine: Any) -> Any:
    """Return what rank 1 sends in a step, of what rank 0 does: another value under the same name."""
    return (True, {name: part._replace(total=7.0) for name, part in mine[1].items()})


def test_step_values_over_ranks() -> None:
    """The value of an epoch's first step is reduced over the ranks.

    One that no rank had in the first step waits for a step in which the ranks compare their names.
    """
    other, later = with_second_rank(other_part), Results(nn.Module(), is_evaluation=False)
    results = logged((1, 3.0), is_evaluation=False, sync_dist=True)
    [value] = results.step_values(other, is_checked=False)
    assert value.value.item() == 5.0
    assert later.step_values(other, is_checked=False) == []
    later.log("x", 3.0, on_step=True, sync_dist=True)
    assert later.step_values(other, is_checked=False) == []
    [value] = later.step_values(other, is_checked=True)
    assert value.value.item() == 5.0


def test_names_of_both(tmp_path: Path) -> None:
    """What is logged by step and by epoch has a name for each, and its own for the latest."""
    train = fitted(tmp_path, Numbered())
    metrics = {name: value.item() for name, value in train.callback_metrics.items()}
    assert metrics == {"number": 1.5, "number_step": 3.0, "number_epoch": 1.5}
    assert train.progress_bar_metrics == {"number_step": 3.0, "number_epoch": 1.5}


@pytest.mark.parametrize("value", ["high", torch.zeros(2), None])
def test_no_number(value: Any) -> None:
    """Only numbers can be logged."""
    with pytest.raises(InvalidTypeError, match="log\\('x'\\) value") as caught:
        Results(nn.Module(), is_evaluation=True).log("x", value)
    assert ("mean()" in str(caught.value)) == isinstance(value, torch.Tensor)  # it is no advice for a text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prog_bar": True}, {}),
        ({"reduce_fx": "max"}, {"reduce_fx": "min"}),
        ({"sync_dist": False}, {}),
        ({"logger": False}, {"logger": True}),
    ],
)
def test_one_name_with_different_options(first: dict[str, Any], second: dict[str, Any]) -> None:
    """A name that is logged with other options, or is of a step's or an epoch's value, is an error."""
    results = logged((1, 1.0), **first)
    with pytest.raises(ConfigurationError, match=r"(?s)'x' is logged in two ways.*log\('x'\) now has"):
        results.log("x", 1.0, **second)
    results = logged((1, 1.0), is_evaluation=False, on_step=True, on_epoch=True)
    raises(ConfigurationError, "'x_epoch' is logged in two ways", results.log, "x_epoch", 1.0)


def test_ranks_with_different_options() -> None:
    """Ranks that reduce a metric in different ways get an error that names it."""
    with pytest.raises(ConfigurationError, match="logged 'x' with different reduce_fx: \\['max', 'mean'\\]"):
        logged((1, 1.0)).epoch_values(with_other(logged((2, 7.0), reduce_fx="max")))


@pytest.mark.parametrize("options", [{"reduce_fx": "sum"}, {"on_epoch": False, "on_step": True}])
def test_sizes_that_no_value_needs(options: dict[str, Any]) -> None:
    """Only means of several batches or ranks need the number of samples."""
    results = Results(nn.Module(), is_evaluation=False)
    results.begin_batch(None)
    results.log("x", 1.0, **options)
    with pytest.raises(ConfigurationError, match=r"(?s)log\('mean'\) averages over batches.*batch_size="):
        results.log("mean", 1.0, on_epoch=True)
    results.log("mean", 1.0, on_epoch=True, batch_size=3)


def logging_in(hook: str) -> Line:
    """Return a module that logs in a hook."""
    module = Line()
    setattr(module, hook, lambda *_: module.log("late", 2.0))
    return module


class Rarely(Line):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.log_dict({"first": 5.0, f"of epoch {self.current_epoch}": 6.0})
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("resumed_at", [1, 3])
def test_values_that_few_steps_log(resumed_at: int, tmp_path: Path) -> None:
    """Loggers get it at their next step, and at each up to the epoch's end; resumed or not."""
    loggers = (Recording(), Recording())
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 2}
    fitted(tmp_path, Rarely(), callbacks=saving_each_step(tmp_path), logger=loggers[0], **options)
    fitted(tmp_path, Rarely(), logger=loggers[1], ckpt_path=tmp_path / f"{resumed_at}.ckpt", **options)
    whole, resumed = ([(step, sorted(found)) for step, found in each.metrics] for each in loggers)
    names = [sorted(["epoch", "first", "loss", f"of epoch {epoch}"]) for epoch in (0, 1)]
    assert whole == [(1, names[0]), (3, names[0]), (5, names[1]), (7, names[1])]
    assert resumed == whole[resumed_at // 2 :]


def test_logging_before_the_first_epoch(tmp_path: Path) -> None:
    """What `on_train_start` logs belongs to the first epoch."""
    train = fitted(tmp_path, logging_in("on_train_start"), max_epochs=2, logger=True)
    assert train.callback_metrics["late"] == 2.0
    assert train.logged_metrics["late"] == 2.0


def test_logging_when_a_fit_stops_within_an_epoch(tmp_path: Path) -> None:
    """What is logged at the end of an epoch counts once, though the hook also ran where the fit stopped."""
    train, model = trainer(tmp_path, max_steps=2), Line()
    model.on_train_epoch_end = lambda: model.log("steps", float(train.global_step))  # type: ignore[method-assign]
    for limit, steps in ((2, 2.0), (3, 3.0), (-1, 4.0)):
        train.max_steps = limit
        train.fit(model, loader())
        assert train.callback_metrics["steps"] == steps


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("setup", "between on_train_start and on_train_end"),
        *((hook, "log") for hook in ("on_train_end", "on_validation_end", "on_predict_batch_end")),
    ],
)
def test_logging_what_is_not_reduced(hook: str, error: str, tmp_path: Path) -> None:
    """What is logged outside of a loop, after metrics were reduced, or in prediction is an error."""
    train, model = trainer(tmp_path), logging_in(hook)
    with pytest.raises(LifecycleError, match=error):
        train.predict(model, loader()) if "predict" in hook else train.fit(model, loader(), loader())


def test_metrics_of_each_stage(tmp_path: Path) -> None:
    """A stage begins without the metrics of the one before; a fit that continues has those of the fit."""
    model = Line()
    train = fitted(tmp_path, model, loader(), loader(), logger=True, log_every_n_steps=2)
    assert set(train.callback_metrics) == set(train.logged_metrics) == {"loss", "val_loss"}
    lines = (tmp_path / "rankwise_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "epoch,loss,step,val_loss"
    train.test(model, loader())
    assert set(train.callback_metrics) == set(train.logged_metrics) == {"test_loss"}
    train.max_epochs, train.limit_val_batches = 2, 0
    train.fit(model, loader(), loader())
    assert set(train.callback_metrics) == {"loss", "val_loss"}


# ------------------------------------------------------------------------ metric objects of torchmetrics


def computed(kind: Any, parts: list[Any]) -> Any:
    """Return the value of a metric over ranks that have updated theirs with a part each, or not for None."""
    by_rank, metrics = [], {"metric": kind()}
    for part in parts:
        metrics = metric_objects(nn.ModuleDict({"metric": kind()}))
        if part is not None:
            metrics["metric"].update(torch.tensor(part))
        by_rank.append(states_of(metrics))
    with merged_states(metrics, by_rank):
        value = metrics["metric"].compute()
        pickle.dumps(metrics["metric"])  # as its compute() may do
    assert metrics["metric"].update_count == int(parts[-1] is not None)  # as before
    return value


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
    assert is_metric_object(kind())
    assert not is_metric_object(torch.ones(1))
    assert computed(kind, [[1.0, 2.0], None, [3.0]]).tolist() == expected
    if kind is torchmetrics.SumMetric:  # has the value that it begins with where no rank has updated it
        with pytest.warns(UserWarning, match="before the ``update`` method"):
            assert computed(kind, [None, None]) == 0


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
    model = WithObject()
    train = fitted(tmp_path, model, max_epochs=2)
    assert train.callback_metrics["total"] == 8 * 1 / 8
    assert model.total.update_count == 0


@pytest.mark.parametrize("options", [{"rank_zero_only": True}, {"sync_dist": False}, {"reduce_fx": "sum"}])
def test_options_that_metric_objects_do_not_have(options: dict[str, Any], tmp_path: Path) -> None:
    """A metric object is reduced over ranks and batches in its own way; the error says so."""
    model = WithObject()
    model.options = options
    raises(ConfigurationError, "computed over all ranks", trainer(tmp_path).fit, model, loader())


class Validated(Line):
    """Updates a metric object in validation; `reset_by_hand` also resets it in a hook."""

    def __init__(self, metric: torchmetrics.Metric, reset_by_hand: bool = False) -> None:
        super().__init__()
        self.metric = metric
        self.reset_by_hand = reset_by_hand

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.metric.update(batch[0][:, 1])
        self.log("metric", self.metric)

    def on_validation_epoch_start(self) -> None:
        if self.reset_by_hand:
            self.metric.reset()


@pytest.mark.parametrize("reset_by_hand", [False, True])
@pytest.mark.parametrize(
    "metric", [torchmetrics.SumMetric, torchmetrics.MaxMetric, partial(torchmetrics.RunningMean, 2)]
)
def test_objects_of_a_validation_before_a_fit(
    metric: Callable[[], torchmetrics.Metric], reset_by_hand: bool, tmp_path: Path
) -> None:
    """`validate` resets a metric object in inference mode; a fit updates it outside of that."""
    model = Validated(metric(), reset_by_hand)
    for _ in range(2):
        train = trainer(tmp_path, num_sanity_val_steps=1)
        train.validate(model, loader(), verbose=False)
        expected = train.callback_metrics["metric"]
        train.fit(model, loader(), loader())
        assert torch.equal(train.callback_metrics["metric"], expected)


class CountsByItself(Line):
    """Counts validation batches in tensors of its own, which it sets back at the end."""

    in_buffer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_buffer", torch.zeros(()))
        self.same = self.count = torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.in_buffer += 1
        self.count += 1

    def on_validation_epoch_end(self) -> None:
        assert self.in_buffer == self.count == self.same > 0
        self.in_buffer = torch.zeros(())
        self.same = self.count = torch.zeros(())


def test_tensors_of_a_validation_before_a_fit(tmp_path: Path) -> None:
    """So it is with a module's own tensors; two names of one tensor stay that."""
    train, model = trainer(tmp_path), CountsByItself()
    train.validate(model, loader(), verbose=False)
    train.fit(model, loader(), loader())
    assert model.same is model.count


def test_one_metric_object_for_several_loaders(tmp_path: Path) -> None:
    """The value of a metric object cannot be that of each loader."""
    model = Validated(torchmetrics.SumMetric())
    assert trainer(tmp_path).validate(model, [loader()])[0]["metric"] > 0
    with pytest.raises(ConfigurationError, match="the same metric object for several loaders"):
        trainer(tmp_path).validate(model, [loader(), loader()])


def test_metric_objects_outside_of_the_module(tmp_path: Path) -> None:
    """A metric object that no checkpoint would hold is refused; the error says where to keep it."""

    class Composing(WithObject):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("squared", self.total**2)

    raises(ConfigurationError, r"(?s)not part of Composing.*__init__", fitted, tmp_path, Composing())


def test_metric_objects_that_are_logged_once(tmp_path: Path) -> None:
    """A run that continues within an epoch shows what was logged before the checkpoint."""

    class Once(WithObject):
        def log(self, *arguments: Any, **options: Any) -> None:
            if self.trainer.global_step == 0:
                super().log(*arguments, **options)

    fitted(tmp_path, Once(), callbacks=saving_each_step(tmp_path))
    train = trainer(tmp_path)
    train.fit(Once(), loader(), ckpt_path=tmp_path / "2.ckpt")
    assert train.callback_metrics["total"] == 8 * 1 / 8


def test_metric_objects_that_a_module_has_no_more(tmp_path: Path) -> None:
    """A checkpoint's states without a metric object in the module are named in a warning."""
    fitted(tmp_path, WithObject(), limit_train_batches=2, callbacks=saving_each_step(tmp_path))
    with pytest.warns(UserWarning, match=r"metric objects that the module has not: \['total'\]"):
        trainer(tmp_path).fit(Line(), loader(), ckpt_path=tmp_path / "2.ckpt")
