"""`python -m rankwise strategies`: the registered names, what they expand to, and what they can be given."""

from __future__ import annotations

import inspect
import json
from typing import Any

from rankwise.doctor.report import table
from rankwise.registry import RegisteredStrategy, StrategyRegistry

_USE = 'Use a name: Trainer(strategy="{name}"). Arguments: StrategyRegistry.create("{name}", timeout=120).'


def list_strategies(*, as_json: bool) -> str:
    """Return the table of names."""
    entries = {name: StrategyRegistry.entry(name) for name in StrategyRegistry}
    return (_as_json if as_json else _as_text)(entries)


def _as_json(entries: dict[str, RegisteredStrategy]) -> str:
    content = {
        name: {
            "class": entry.strategy.__name__,
            "start_method": _start_method(entry),
            "description": entry.description,
            "arguments": {key: _plain(value) for key, value in entry.init_params.items()},
            "defaults": {key: _plain(value) for key, value in _defaults(entry.strategy).items()},
        }
        for name, entry in entries.items()
    }
    return f"{json.dumps(content, indent=2)}\n"


def _as_text(entries: dict[str, RegisteredStrategy]) -> str:
    rows = [
        (name, _expansion(entry), _start_method(entry) or "-", entry.description)
        for name, entry in entries.items()
    ]
    lines = [*table(("name", "stands for", "start method", "description"), rows), ""]
    classes = dict.fromkeys(entry.strategy for entry in entries.values())
    for cls in classes:
        arguments = ", ".join(f"{key}={_word(value)}" for key, value in _defaults(cls).items())
        lines.append(f"{cls.__name__}({arguments})")
    lines += ["", _USE.format(name="ddp_spawn")]
    return "".join(f"{line}\n" for line in lines)


def _expansion(entry: RegisteredStrategy) -> str:
    arguments = ", ".join(f"{key}={_word(value)}" for key, value in entry.init_params.items())
    return f"{entry.strategy.__name__}({arguments})"


def _start_method(entry: RegisteredStrategy) -> str | None:
    default = getattr(entry.strategy, "default_start_method", None)
    chosen: str | None = entry.init_params.get("start_method", default)
    return chosen


def _defaults(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def _word(value: object) -> str:
    return repr(value) if _plain(value) is value else str(_plain(value))


def _plain(value: object) -> object:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else str(value)
