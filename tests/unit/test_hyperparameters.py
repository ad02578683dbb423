"""The hyperparameters that an object collects from its constructors."""

import copy
import inspect
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError
from rankwise.hyperparameters import (
    AttributeDict,
    HyperparametersMixin,
    checkpointed_parts,
    left_out_of_checkpoints,
)
from tests.helpers.raising import raises


class Base(HyperparametersMixin):
    """Saves all of its arguments."""

    def __init__(self, lr: float, *rest: int, width: int = 3, **options: Any) -> None:
        self.save_hyperparameters()


class Derived(Base):
    """Has an argument more, and saves nothing itself."""

    def __init__(self, depth: int, lr: float = 0.5) -> None:
        super().__init__(lr * 2, 7, dropout=0.1)


class Saves(HyperparametersMixin):
    """Calls `save_hyperparameters` with given arguments."""

    def __init__(self, lr: Any, width: Any, call: tuple[Any, ...] = (), options: Any = None) -> None:
        self.save_hyperparameters(*call, **{"ignore": ["call", "options"], **(options or {})})


def test_all_arguments() -> None:
    """Without names all are saved, with defaults and keywords, without `*args`; a subclass's, too."""
    assert Base(0.1, 1, 2, seed=5).hparams == {"lr": 0.1, "width": 3, "seed": 5}
    assert Derived(4).hparams == {"depth": 4, "lr": 0.5, "width": 3, "dropout": 0.1}


def test_both_classes_save() -> None:
    """Several calls add to each other, and `ignore` removes; those of other objects' constructors do not."""

    class Both(Base):
        def __init__(self, lr: float, net: object) -> None:
            super().__init__(lr)
            self.save_hyperparameters(ignore=["net", "width"])

    assert Both(0.1, object()).hparams == {"lr": 0.1}

    class Outer(HyperparametersMixin):
        def __init__(self, depth: int) -> None:
            self.inner = Base(0.3)

    assert Outer(2).inner.hparams == {"lr": 0.3, "width": 3}


def test_names() -> None:
    """Only the named arguments are saved; what the constructor does not have, or is no name, is refused."""
    assert Saves(0.1, 2, ("width",)).hparams == {"width": 2}
    raises(UnknownNameError, "widht", Saves, 0.1, 2, ("widht",))
    wrong: list[tuple[Any, ...]] = [(5,), ({"a": 1}, "width"), ({"a": 1}, {"b": 2})]
    for call in wrong:
        raises(InvalidTypeError, "save_hyperparameters", Saves, 0.1, 2, call)


@pytest.mark.parametrize("ignore", ["width", ["width"], ("width",), {"width"}])
def test_ignore(ignore: Any) -> None:
    """One name or several are left out."""
    assert "width" not in Saves(0.1, 2, options={"ignore": ignore}).hparams


@pytest.mark.parametrize("kind", [Namespace, AttributeDict, OrderedDict])
def test_a_container(kind: type) -> None:
    """The items of a namespace or mapping are saved, and the argument's name for loading."""
    given = kind(a=1, b="x")
    saved = Saves(given, 2, (given,))
    assert saved.hparams == {"a": 1, "b": "x"}
    assert checkpointed_parts(saved) == {"hyper_parameters": {"a": 1, "b": "x"}, "hparams_name": "lr"}


def test_attributes_and_items() -> None:
    """Hyperparameters are items and attributes, to read, set and delete."""
    hparams = Base(0.1).hparams
    hparams.lr = 0.2
    hparams["decay"] = 1
    del hparams.width
    assert (hparams["lr"], hparams.decay, "width" in hparams) == (0.2, 1, False)
    with pytest.raises(AttributeError, match=r"no 'width' among \['decay', 'lr'\]"):
        _ = hparams.width
    with pytest.raises(AttributeError, match="no 'width'"):
        del hparams.width
    assert copy.deepcopy(hparams) == pickle.loads(pickle.dumps(hparams)) == hparams


def test_initial() -> None:
    """What is changed later is not in `hparams_initial`, which nothing changes; a mapping can be assigned."""
    saved = Saves([1], 2)
    saved.hparams.lr.append(2)
    saved.hparams.width = 5
    saved.hparams_initial.lr.append(3)
    assert (saved.hparams_initial.lr, saved.hparams_initial.width) == ([1], 2)
    assert HyperparametersMixin().hparams_initial == HyperparametersMixin().hparams == {}
    given = Base(0.1)
    given.hparams = {"lr": 3}
    assert given.hparams.lr == given.hparams_initial.lr == 3
    with pytest.raises(InvalidTypeError, match="hparams=3 is of type int"):
        given.hparams = 3  # type: ignore[assignment]
    assert Base(0.1).logged_hparams == {"lr": 0.1, "width": 3}
    assert Saves(0.1, 2, options={"logger": False}).logged_hparams == {}


def test_where_it_is_called() -> None:
    """A helper passes the constructor's frame, or just calls; elsewhere only a mapping can be saved."""

    class Helped(HyperparametersMixin):
        def __init__(self, lr: float, frame: bool) -> None:
            self._help(inspect.currentframe() if frame else None)

        def _help(self, frame: Any) -> None:
            self.save_hyperparameters("lr", frame=frame)

    assert Helped(0.1, True).hparams == Helped(0.1, False).hparams == {"lr": 0.1}

    saved = Base(0.1)
    raises(ConfigurationError, "no constructor of Base is running", saved.save_hyperparameters)
    saved.save_hyperparameters({"lr": 3})
    assert saved.hparams.lr == 3


def test_what_checkpoints_hold() -> None:
    """Namespaces and mappings become dictionaries; what does not load is left out, if nobody has named it."""
    nested = {"a": Namespace(b=AttributeDict(c=[Path("d")])), "e": (torch.float32, None)}
    saved = Saves(nested, torch.nn.Linear(1, 1))
    assert list(left_out_of_checkpoints(saved)) == ["width"]
    assert checkpointed_parts(saved) == {
        "hyper_parameters": {"lr": {"a": {"b": {"c": [Path("d")]}}, "e": (torch.float32, None)}},
        "hparams_name": "kwargs",
    }
    assert type(checkpointed_parts(saved)["hyper_parameters"]["lr"]["a"]["b"]) is dict
    assert not left_out_of_checkpoints(Saves(0.1, max, ("width",)))
    assert checkpointed_parts(Saves(max, max)) == {}


def test_containers_at_many_places() -> None:
    """Containers that hold one another at 2^60 places are stored as such."""
    lists: Any = [1]
    for _ in range(60):
        lists = [lists, Namespace(x=lists)]
    stored = checkpointed_parts(Saves(lists, 3))["hyper_parameters"]["lr"]
    assert stored[0] is stored[1]["x"]
