"""`python -m rankwise strategies`: the registered names, what they stand for, and their arguments."""

from __future__ import annotations

import inspect
import json
import textwrap
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
    for classes, defaults in _by_defaults(entries).items():
        lines += textwrap.wrap(f"{', '.join(classes)}: {defaults}", 110, subsequent_indent="    ")
    lines += ["", _USE.format(name="ddp_spawn")]
    return "".join(f"{line}\n" for line in lines)


def _by_defaults(entries: dict[str, RegisteredStrategy]) -> dict[tuple[str, ...], str]:
    """Return the arguments with their defaults as text, by the classes that share them."""
    found: dict[str, list[str]] = {}
    for cls in dict.fromkeys(entry.strategy for entry in entries.values()):
        text = ", ".join(f"{key}={_word(value)}" for key, value in _defaults(cls).items())
        found.setdefault(text, []).append(cls.__name__)
    return {tuple(classes): text for text, classes in found.items()}


def _expansion(entry: RegisteredStrategy) -> str:
    arguments = ", ".join(f"{key}={_word(value)}" for key, value in entry.init_params.items())
    return f"{entry.strategy.__name__}({arguments})"


def _start_method(entry: RegisteredStrategy) -> str | None:
    default = getattr(entry.strategy, "default_start_method", None)
    chosen: str | None = entry.init_params.get("start_method", default)
    return chosen


def _defaults(cls: type) -> dict[str, Any]:
    """Return a constructor's keywords and defaults, including those that it forwards to a base class."""
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        given = {each.name: each.default for each in parameters if each.default is not each.empty}
        defaults = {**given, **defaults}
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    return defaults


def _word(value: object) -> str:
    return repr(value) if _plain(value) is value else str(_plain(value))


def _plain(value: object) -> object:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else str(value)
