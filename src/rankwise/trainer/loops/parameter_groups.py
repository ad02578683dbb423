"""The parameters of an optimizer's groups by name: hooks may add groups that `configure_optimizers` lacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Groups = list[list[Any]]
"""For each group the names of its parameters; a parameter that is not in the module is there itself."""
_ParametersOf = Callable[["Optimizer"], list[Tensor]]
"""Returns the module's parameters that an optimizer updates, directly or as copies, in its order."""


def groups_of(optimizer: Optimizer, module: nn.Module, parameters_of: _ParametersOf) -> Groups:
    """Return the parameters of each group of an optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    updated = iter(parameters_of(optimizer))
    return [
        [names.get(id(each), each.detach()) for each in islice(updated, len(group["params"]))]
        for group in optimizer.param_groups
    ]


def restore_groups(
    optimizer: Optimizer, saved: Groups, module: nn.Module, parameters_of: _ParametersOf
) -> bool:
    """Give an optimizer the groups that were saved, if they have more parameters; return whether they do.

    Parameters that are not in the module get their values. Other groups do not change.

    Raises:
        ConfigurationError: for a parameter that is not in the module, and was added after the creation of the
            optimizer: it cannot be matched with a parameter of the program.
    """
    own = groups_of(optimizer, module, parameters_of)
    mains = iter([each for group in optimizer.param_groups for each in group["params"]])
    by_entry = {_key(entry, place): next(mains) for place, entry in _placed(own)}
    named = dict(module.named_parameters())
    saved_keys = {_key(entry, place) for place, entry in _placed(saved)}
    is_known = all(entry in named for _, entry in _placed(saved) if isinstance(entry, str))
    if not by_entry.keys() <= saved_keys or not is_known:
        return False
    for number, entries in enumerate(saved):
        parameters = []
        for position, entry in enumerate(entries):
            key = _key(entry, (number, position))
            main = by_entry.get(key)
            if isinstance(entry, Tensor):
                if main is None:
                    raise _unknown_error(optimizer, entry)
                with torch.no_grad():
                    main.copy_(entry)
            parameters.append(named[key] if main is None else main)
        if number < len(own):
            optimizer.param_groups[number]["params"] = parameters
        else:
            optimizer.add_param_group({"params": parameters})
    return by_entry.keys() != saved_keys


def _unknown_error(optimizer: Optimizer, parameter: Tensor) -> ConfigurationError:
    return ConfigurationError(
        message=f"Training cannot continue: a hook gave {type(optimizer).__name__} a parameter that is in no "
        "module.",
        facts=f"its shape is {tuple(parameter.shape)}; nothing tells which parameter of the program it was.",
        remedy="self.name = nn.Parameter(...) in the module, or give it to the optimizer in "
        "configure_optimizers().",
    )


def _placed(groups: Groups) -> list[tuple[tuple[int, int], Any]]:
    """Return each entry with the number of its group and its position there."""
    return [
        ((number, position), entry)
        for number, group in enumerate(groups)
        for position, entry in enumerate(group)
    ]


def _key(entry: Any, place: tuple[int, int]) -> Any:
    return entry if isinstance(entry, str) else place
