"""Functions of the tensors in containers and dataclasses."""

import array
from collections import Counter, OrderedDict, UserDict, UserString, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from rankwise.nested import map_nested, map_tensors, walked
from rankwise.strategies import DDPStrategy
from tests.unit.trainer.helpers import Line, samples, trainer

Pair = namedtuple("Pair", "x y")
Counted: Any = Counter


@dataclass
class Plain:
    x: Any
    name: str = "plain"
    made: Any = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made = self.x


@dataclass(frozen=True)
class Frozen:
    x: Any
    inner: Any = None

    @cached_property
    def total(self) -> Tensor:
        total: Tensor = self.x.sum()
        return total


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


class Counting(Plain):
    """A dataclass whose attributes do more when they are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("count", getattr(self, "count", 0) + 1)
        super().__setattr__(name, value)


def doubled(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor * 2)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "tensor_of"),
    [
        (ONE, lambda value: value),
        *((value, itemgetter(0)) for value in ([ONE, "text"], (ONE, 3))),
        *((kind(x=ONE), itemgetter("x")) for kind in (dict, OrderedDict, UserDict, Counted)),
        *((value, itemgetter("x")) for value in (defaultdict(None, x=ONE), MappingProxyType({"x": ONE}))),
        (deque([3, ONE], 2), itemgetter(1)),
        (Pair(ONE, None), attrgetter("x")),
        (Plain(ONE), attrgetter("made")),
        *((kind(ONE), attrgetter("x")) for kind in (Plain, Frozen, Slotted, Counting)),
        ([{"x": (Frozen(3, Frozen(ONE)),)}], lambda value: value[0]["x"][0].inner.x),
    ],
)
def test_every_container(value: Any, tensor_of: Any) -> None:
    """Containers of every kind are copied, with their types; the originals do not change."""
    result = doubled(value)
    assert type(result) is type(value)
    assert (tensor_of(result).item(), tensor_of(value).item()) == (2, 1)
    assert value is ONE or result is not value


def test_what_stays() -> None:
    """Other values come back as they are; a container keeps its defaults, its versions or its length."""
    values = [None, 3, "text", b"bytes", bytearray(3), range(3), Frozen, {1, 2}, torch.Size([3])]
    for value in (*values, array.array("d", [3]), memoryview(b"bytes"), UserString("text")):
        assert doubled(value) is value
    made: Any = defaultdict(list)
    made["x"] = ONE
    assert doubled(made)["new"] == []
    assert doubled(Line().state_dict())._metadata
    assert doubled(deque([ONE], 3)).maxlen == 3


def test_values_of_other_kinds() -> None:
    """Any kind can be mapped, all others by another function; walking ends in what contains itself."""
    mapped = map_nested([3, {"x": (True, 2.0)}, "text"], (int, bool), lambda number: number + 1, str)
    assert mapped == [4, {"x": (2, "2.0")}, "text"]
    value: list[Any] = [1]
    value.append(value)
    assert list(walked(value, lambda item: item if type(item) is list else None)) == [value, 1, value]


def test_containers_at_many_places() -> None:
    """A container is copied once; a function may be called for each place, which matters to collectives."""
    value: Any = [ONE]
    for number in range(60):
        value = [value, value] if number % 2 else {"x": value, "y": (value,)}
    result = doubled(value)
    assert result[0] is result[1]
    leaf = result
    while isinstance(leaf, (list, dict)):
        leaf = leaf[0] if isinstance(leaf, list) else leaf["x"]
    assert leaf == 2
    calls: list[int] = []
    twice = [3]
    assert map_nested([twice, twice], int, calls.append, each_place=True) == [[None], [None]]
    assert calls == [3, 3]


def test_cached_properties_are_computed_anew() -> None:
    """They depend on fields, which have changed; fields are set in the dataclass's own way."""
    value = Frozen(torch.ones(3))
    assert value.total == 3
    assert doubled(value).total == 6
    counting: Any = Counting(ONE)
    assert doubled(counting).count > counting.count


class OnMeta(DDPStrategy):
    """Has another device than the CPU."""

    root_device: Any = torch.device("meta")


def test_batches_are_moved() -> None:
    """Every tensor of a batch is moved, but for the sizes of a packed sequence, which stay on the CPU."""
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    frozen, (moved,) = OnMeta().batch_to_device((Frozen(ONE), [packed]))
    assert frozen.x.is_meta
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


class Wrapped(Line):
    """Reads and predicts batches that are frozen dataclasses."""

    def training_step(self, batch: Frozen, batch_idx: int) -> Any:
        return super().training_step(batch.x, batch_idx)

    def predict_step(self, batch: Frozen, batch_idx: int) -> Any:
        return Frozen(self.layer(batch.x[0]), [batch])


def collate(items: Any) -> Frozen:
    return Frozen([torch.stack(column) for column in zip(*items, strict=True)])


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [("64-true", {torch.float64}), ("bf16-mixed", {torch.float32}), ("32-true", {torch.float32})],
)
def test_frozen_batches_and_predictions(tmp_path: Path, precision: str, dtypes: set[torch.dtype]) -> None:
    """Batches and predictions that are frozen dataclasses are converted like others."""
    train, data = trainer(tmp_path, precision=precision), DataLoader(samples(), 2, collate_fn=collate)
    train.fit(Wrapped(), data)
    predicted = train.predict(Wrapped(), data)
    assert {output.x.dtype for output in predicted} == dtypes
    assert {tensor.dtype for output in predicted for tensor in output.inner[0].x} == dtypes
