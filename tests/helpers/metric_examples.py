"""Every class of torchmetrics that can be made here, with updates from the example in its documentation."""

import contextlib
import copy
import doctest
import functools
import importlib
import inspect
import io
import itertools
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

PARTS = 3
Call = tuple[tuple[Any, ...], dict[str, Any]]

OWN_EXAMPLES = {  # of classes that have none, or one that needs a package
    "LipVertexError": """
        >>> metric = LipVertexError(mouth_map=[0, 2])
        >>> metric.update(torch.rand(7, 5, 3), torch.rand(7, 5, 3))
        """,
    "FrechetInceptionDistance": """
        >>> metric = FrechetInceptionDistance(feature=Means(), normalize=True)
        >>> metric.update(torch.rand(5, 3, 8, 8), real=True)
        >>> metric.update(torch.rand(5, 3, 8, 8), real=False)
        """,
}


class Means(nn.Module):
    """Features of images: the mean of each channel."""

    num_features = 3

    @override
    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean((2, 3))


class Example(NamedTuple):
    """A metric object without updates, and its updates, which a test divides among the ranks."""

    metric: Metric
    updates: list[Call]


def metric_classes() -> dict[str, type[Metric]]:
    """Return the public classes of all metrics by their names."""
    found: dict[str, type[Metric]] = {}
    for info in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            for name, kind in vars(importlib.import_module(info.name)).items():
                is_metric = isinstance(kind, type) and issubclass(kind, Metric)
                if is_metric and kind.__module__.startswith("torchmetrics.") and not name.startswith("_"):
                    found[name] = kind
    return {name: kind for name, kind in found.items() if not inspect.isabstract(kind)}


def examples() -> tuple[dict[str, Example], dict[str, str]]:
    """Return the examples by class, and why there is none of other classes."""
    found, missing = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in metric_classes().items():
            made = _example_of(kind)
            if isinstance(made, Example):
                found[name] = made
            else:
                missing[name] = made
    return found, missing


def _example_of(kind: type[Metric]) -> Example | str:
    with _recorded_updates(kind) as recorded:
        problem = _run_example(kind)
    if not recorded:
        return problem
    metric, calls = recorded[0][0], [call for _, call in recorded]
    for updates in (_divided(calls[0]), calls * PARTS, calls[:1] * PARTS):
        try:  # some need several samples, or several kinds of updates
            trial = copy.deepcopy(metric)
            for arguments, options in updates:
                trial.update(*arguments, **options)
            digest(trial.compute())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if updates:
                return Example(metric, updates)
    return problem


@contextlib.contextmanager
def _recorded_updates(kind: type[Metric]) -> Iterator[list[tuple[Metric, Call]]]:
    """Record the first object of a class in the block, before its updates, and the updates."""
    recorded: list[tuple[Metric, Call]] = []
    objects: list[Metric] = []
    depth = 0

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(metric: Metric, *arguments: Any, **options: Any) -> Any:
            nonlocal depth
            if not objects and not depth:
                objects.append(metric)
            if metric is objects[0] and not depth:
                recorded.append((copy.deepcopy(metric), (arguments, options)))
            depth += 1
            try:
                return method(metric, *arguments, **options)
            finally:
                depth -= 1

        return call

    own = {name: vars(kind).get(name) for name in ("update", "forward")}
    for name in own:
        setattr(kind, name, recording(getattr(kind, name)))
    try:
        yield recorded
    finally:
        for name, method in own.items():
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _run_example(kind: type[Metric]) -> str:
    """Run the example in a class's documentation; return how it ended."""
    names = {**vars(torchmetrics), "torch": torch, "tensor": torch.tensor, "Means": Means}
    names[kind.__name__] = kind
    text = OWN_EXAMPLES.get(kind.__name__, kind.__doc__ or "")
    for example in doctest.DocTestParser().get_examples(inspect.cleandoc(text)):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(example.source, "<example>", "single"), names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no example"


def _divided(call: Call) -> list[Call]:
    """Divide the samples of an update into several, of different sizes; return none if it has no samples."""
    arguments, options = call
    values = [*arguments, *options.values()]
    lengths = {len(value) for value in values if _has_samples(value)}
    if len(lengths) != 1 or (count := lengths.pop()) < 2:
        return []
    ends = sorted({0, count // 2, max(1, count - 1), count})
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    return [
        (tuple(_part(v, part) for v in arguments), {n: _part(v, part) for n, v in options.items()})
        for part in parts
    ]


def _has_samples(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)


def _part(value: Any, part: slice) -> Any:
    return value[part] if _has_samples(value) else value


def digest(value: Any) -> Tensor:
    """Return one number for the value of any metric, which does not depend on the order of lists."""
    numbers = torch.cat([number.detach().double().flatten() for number in _numbers(value)])
    ordered = numbers.nan_to_num(nan=7.0, posinf=5.0, neginf=3.0).sort().values
    total: Tensor = (ordered * torch.linspace(1, 2, len(ordered), dtype=torch.double)).sum()
    return total


def _numbers(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (Tensor, int, float)):
        yield torch.as_tensor(value)
