"""Name the attribute at which pickling has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rankwise.errors import NotPicklableError, text_of
from rankwise.processes.memory_file import pack, pickling_error

_DEPTH = 20


def pack_or_explain(value: object, descriptor: int, start_method: str, roots: Mapping[str, object]) -> None:
    """Pack a value; `NotPicklableError` names the attribute of one of the `roots` that cannot be pickled."""
    try:
        pack(value, descriptor)
    except Exception as error:  # noqa: BLE001  pickling runs the user's code
        path, culprit = _find_culprit(roots.items(), set()) or ("what is launched", error)
        reason = text_of(culprit).partition("\n")[0]
        raise NotPicklableError(path=path, reason=reason, start_method=start_method) from None


def _find_culprit(parts: Iterable[tuple[str, object]], seen: set[int]) -> tuple[str, Exception] | None:
    """Return the path of the innermost part that cannot be pickled, and why; `seen` has those around it."""
    for path, part in parts if len(seen) < _DEPTH else ():
        error = pickling_error(part)
        if error is not None and id(part) not in seen:
            seen.add(id(part))
            return _find_culprit(_parts_of(part, path), seen) or (path, error)
    return None


def _parts_of(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the parts of a value with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{path}[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(value):
            yield f"{path}[{index}]", part
    else:
        for name, part in _state_of(value).items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(part, Mapping):
                yield from ((f"{path}.{key}", submodule) for key, submodule in part.items())
            else:
                yield f"{path}.{name}", part


def _state_of(value: object) -> Mapping[str, object]:
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001  pickling runs the user's code
        return getattr(value, "__dict__", {})
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    return state if isinstance(state, Mapping) else {}
