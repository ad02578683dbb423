"""Before a fit begins: do the ranks train the same module, with the same versions?"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from rankwise.errors import RankMismatchError

if TYPE_CHECKING:
    from rankwise.strategies import Strategy

__all__ = ["check_ranks_agree", "differences"]

_ORDER = "the order of the parameters"


def check_ranks_agree(strategy: Strategy, module: nn.Module) -> None:
    """Compare what the ranks are about to train.

    Collective: every rank must call this. One small exchange; a second one only where something differs.

    Raises:
        RankMismatchError: on every rank, when something does; it groups the ranks.
    """
    if strategy.world_size == 1:
        return
    facts = _facts(module)
    fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    if len(set(strategy.all_gather_object(fingerprint))) > 1:
        raise RankMismatchError(differences(strategy.all_gather_object(facts)))


def differences(facts: list[dict[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return what differs: for each name its values, and for each value the ranks that have it."""
    names = dict.fromkeys(name for own in facts for name in own)
    found = {}
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(facts):
            ranks[own.get(name, "absent")].append(rank)
        if len(ranks) > 1:
            found[name] = {value: tuple(who) for value, who in ranks.items()}
    if any(name.startswith("parameter ") for name in found):
        found.pop(_ORDER, None)  # that follows
    return found


def _facts(module: nn.Module) -> dict[str, str]:
    parameters = dict(module.named_parameters())
    return {
        "the version of rankwise": sys.modules["rankwise"].__version__,
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        **{f"parameter {name!r}": _described(parameter) for name, parameter in parameters.items()},
        _ORDER: ", ".join(parameters),
    }


def _described(parameter: nn.Parameter) -> str:
    is_lazy = isinstance(parameter, UninitializedParameter)
    shape = "not initialised" if is_lazy else f"shape {tuple(parameter.shape)}"
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype}, {shape}{'' if parameter.requires_grad else ', frozen'}"
