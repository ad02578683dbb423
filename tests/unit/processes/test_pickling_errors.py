"""Which attribute is it that cannot be pickled? The error names the path to it."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from rankwise.errors import NotPicklableError
from rankwise.processes.memory_file import create_memory_file, unpack
from rankwise.processes.pickling_errors import pack_or_explain


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = create_memory_file()
    yield descriptor
    os.close(descriptor)


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Looped(Holder):
    """An object that leads back to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = self
        self.lock = threading.Lock()


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


def model_with_lambda() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    model[1][0].hook = lambda: None  # type: ignore[index]  # a Sequential
    return model


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: None, "the value"),
        (Holder(lock=threading.Lock()), "the value.lock"),
        (Holder(a=1, b=Holder(c=[1, {"key": lambda: None}])), "the value.b.c[1]['key']"),
        ((1, [2, (3, lambda: None)]), "the value[1][1][1]"),
        ({"a": {5: lambda: None}}, "the value['a'][5]"),
        (model_with_lambda(), "the value.1.0.hook"),
        (Looped(), "the value.lock"),
        (Slotted(threading.Lock()), "the value"),
    ],
    ids=["itself", "attribute", "nested", "tuples", "mapping", "module", "loop", "slots"],
)
def test_the_path_is_named(value: object, path: str, file: int) -> None:
    """From the root that the user knows down to the culprit, or to the object that has it in a slot."""
    with pytest.raises(NotPicklableError) as caught:
        pack_or_explain(value, file, "spawn", {"the value": value})
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} cannot be pickled, which start_method='spawn' needs: ")
    assert 'strategy="ddp" or "ddp_fork"' in str(caught.value)


def test_the_first_bad_root_is_named(file: int) -> None:
    """Of several roots the one that is at fault."""
    roots = {"the launched function": print, "argument 0": threading.Lock()}
    with pytest.raises(NotPicklableError, match=r"^argument 0 cannot be pickled"):
        pack_or_explain(list(roots.values()), file, "forkserver", roots)


def test_what_can_be_pickled_is_packed(file: int) -> None:
    """Nothing is said when nothing is wrong."""
    pack_or_explain([1, 2], file, "spawn", {})
    assert unpack(file, copy=True) == [1, 2]
