"""Read what loggers have written: event files of TensorBoard, offline runs of W&B, runs of MLflow."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32768  # bytes; a record's parts never cross the end of a block
_HEADER = struct.Struct("<IHB")  # checksum, length, type of a part
_FIRST, _LAST = (1, 2), (1, 4)  # types of the parts that begin and end a record; 1 does both


def variables(folder: Path) -> dict[str, str]:
    """Return variables with which W&B and MLflow keep their files in a folder and open no connection."""
    folders = {f"WANDB_{name}_DIR": str(folder / name) for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")}
    true = ("WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY")
    return {
        **folders,
        **dict.fromkeys(true, "true"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB__DISABLE_STATS": "true",  # its monitor of the machine leaves a socket behind now and then
        "GIT_PYTHON_REFRESH": "quiet",
    }


def event_files(folder: Path | str) -> list[str]:
    """Return the names of the event files in a folder, oldest first."""
    return sorted(path.name for path in Path(folder).glob("events.*"))


def events(folder: Path | str) -> Any:
    """Return what TensorBoard reads in a folder: an `EventAccumulator`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def scalars(folder: Path | str) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each metric in a folder's event files."""
    read = events(folder)
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@dataclass
class OfflineRun:
    """What an offline run of W&B has recorded."""

    id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Return the offline runs in a logger's `save_dir`, oldest first."""
    return [_offline_run(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _offline_run(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for data in _records(path.read_bytes()):
        record: Any = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.project = record.run.run_id, record.run.project
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":
            run.config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "history":
            items = record.history.item
            run.history.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the format of LevelDB's log, after W&B's own header."""
    assert data[:4] == b":W&B"
    position, record = _HEADER.size, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        start, position = position + _HEADER.size, position + _HEADER.size + length
        record = (b"" if kind in _FIRST else record) + data[start:position]
        if kind in _LAST:
            yield record
