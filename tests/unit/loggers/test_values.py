"""Hyper parameters and images as loggers write them."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rankwise.loggers.values import flat_parameters, image_array, nested_parameters


@dataclass
class Data:
    """A dataclass among the parameters."""

    path: Path
    size: int = 8


PARAMS = Namespace(
    optimizer={"lr": torch.tensor(0.5), 1: None},
    data=Data(Path("here")),
    layers=[8, np.int64(4)],
    empty={},
    act=None,
    on=True,
)


def test_flat() -> None:
    """Names are joined by "/"; numbers stay numbers, all else becomes a string."""
    assert flat_parameters(PARAMS) == {
        "optimizer/lr": 0.5,
        "optimizer/1": None,
        "data/path": "here",
        "data/size": 8,
        "layers": str(PARAMS.layers),
        "empty": "{}",
        "act": None,
        "on": True,
    }
    assert flat_parameters({}) == {}


def test_nested() -> None:
    """Dictionaries and lists stay as they are, also those that hold one another at 2^60 places."""
    assert nested_parameters(PARAMS) == {
        "optimizer": {"lr": 0.5, "1": None},
        "data": {"path": "here", "size": 8},
        "layers": [8, 4],
        "empty": {},
        "act": None,
        "on": True,
    }
    lists: list[object] = [1]
    for _ in range(60):
        lists = [lists, lists]
    nested = nested_parameters({"x": lists})["x"]
    assert nested[0] is nested[1]


def test_images() -> None:
    """A tensor's channels come first and are moved to the end; arrays stay as they are."""
    image = torch.arange(6.0).reshape(1, 2, 3)
    assert image_array(image.requires_grad_()).shape == (2, 3, 1)
    assert image_array(image[0]).shape == (2, 3)
    array = np.zeros((2, 3, 4))
    assert image_array(array) is array
