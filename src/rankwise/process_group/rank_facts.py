"""What must be the same on all ranks, as facts by name, and where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.parameter import is_lazy

_ORDER = "the order of the parameters"


def facts_of_parameters(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a description of each parameter by name, and their order."""
    return {
        **{f"parameter {name!r}": described(each, each.requires_grad) for name, each in parameters.items()},
        _ORDER: ", ".join(parameters),
    }


def differences(facts: Sequence[Mapping[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names whose values differ, with the ranks (positions in `facts`) that have each value."""
    names = dict.fromkeys(name for own in facts for name in own)
    found = {}
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(facts):
            ranks[own.get(name, "absent")].append(rank)
        if len(ranks) > 1:
            found[name] = {value: tuple(who) for value, who in ranks.items()}
    if any(name.startswith("parameter ") for name in found):
        found.pop(_ORDER, None)  # differs as a consequence
    return found


def described(parameter: Tensor, is_trained: bool) -> str:
    """Return dtype and shape of a parameter, and whether it is frozen."""
    shape = "not initialised" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype}, {shape}{'' if is_trained else ', frozen'}"
