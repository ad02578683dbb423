"""Read, write and compare the files of `records`, which hold what Lightning gives.

`python -m tests.process.migration.record` writes them.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RECORDS = Path(__file__).parent / "records"
COMMAND = "python -m tests.process.migration.record"
TOLERANCE = 1e-4
"""How far a value may be from a recorded one, relative to it and absolutely.

Other CPUs round differently, and optimizers enlarge that. The largest difference between runs with the
instructions of AVX-512 and of AVX2 is 5e-7, between AVX-512 and SSE 4.2 it is 3e-5.
"""
ENTRIES = 32


def summary(value: Any) -> Any:
    """Return a value as JSON has it, with a short description in place of each tensor.

    That is the shape, the root mean square, a projection, and at most `ENTRIES` entries at equal distances.
    Every entry of the tensor counts in the projection, with a factor of its own.
    """
    if isinstance(value, torch.Tensor):
        entries = value.detach().double().flatten()
        size = max(1, len(entries))
        factors = torch.arange(len(entries), dtype=torch.float64).cos()
        described = {
            "root_mean_square": float(entries.norm()) / size**0.5,
            "projection": float(entries @ factors) / size**0.5,
            "entries": entries[:: math.ceil(size / ENTRIES)].tolist(),
        }
        return {"shape": list(value.shape), **summary(described)}
    if isinstance(value, Mapping):
        return {str(name): summary(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [summary(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read(name: str) -> dict[str, Any]:
    """Return a record."""
    record: dict[str, Any] = json.loads(_path(name).read_text())
    return record


def write(name: str, sources: Iterable[Path], content: Mapping[str, Any]) -> None:
    """Write a record, with the versions and the digest of the sources that it was made with."""
    RECORDS.mkdir(exist_ok=True)
    record = {"versions": versions(), "digest": digest(sources), **content}
    _path(name).write_text(f"{json.dumps(record)}\n")


def names() -> list[str]:
    """Return the names of all records."""
    return sorted(path.stem for path in RECORDS.glob("*.json"))


def problem(name: str, sources: Iterable[Path]) -> str | None:
    """Return why a record has to be made again, or None."""
    record = read(name)
    if record["digest"] != digest(sources):
        return f"What {name}.json was recorded with has changed. Fix: {COMMAND} {name}"
    if record["versions"] != (found := versions()):
        return f"{name}.json is of {record['versions']}, installed are {found}. Fix: {COMMAND}"
    return None


def versions() -> dict[str, str]:
    """Return the installed versions of torch and Lightning, without the build of torch."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "lightning")}


def digest(sources: Iterable[Path]) -> str:
    """Return a digest of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def differences(lightning: Any, rankwise: Any, where: str = "", tolerance: float = TOLERANCE) -> list[str]:
    """Return where two values, or what is in them, differ."""
    if isinstance(lightning, torch.Tensor):
        return differences(lightning.tolist(), rankwise.tolist(), where, tolerance)
    if isinstance(lightning, Mapping):
        found = []
        for name in {**lightning, **rankwise}:
            if name in lightning and name in rankwise:
                found += differences(lightning[name], rankwise[name], f"{where}/{name}", tolerance)
            else:
                found.append(
                    f"{where}/{name} is missing in {'rankwise' if name in lightning else 'lightning'}"
                )
        return found
    if isinstance(lightning, (list, tuple)) and len(lightning) == len(rankwise):
        pairs = enumerate(zip(lightning, rankwise, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, f"{where}/{at}", tolerance)]
    return (
        [] if _is_close(lightning, rankwise, tolerance) else [f"{where}: {lightning!r} became {rankwise!r}"]
    )


def _is_close(first: Any, second: Any, tolerance: float) -> bool:
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
    return bool(first == second)


def _path(name: str) -> Path:
    return RECORDS / f"{name}.json"
