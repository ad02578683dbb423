"""Build a module or a data module from a checkpoint: its constructor gets the hyperparameters."""

from __future__ import annotations

import ast
import csv
import inspect
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import Tensor, nn

from rankwise import ranks
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.checkpoint.base import restored_from
from rankwise.checks import check_installed, check_is_a, check_value
from rankwise.errors import (
    CheckpointError,
    ConfigurationError,
    RankwiseError,
    UnknownArgumentError,
)
from rankwise.hyperparameters import DATA_MODULE_KEYS, MODULE_KEYS, AttributeDict
from rankwise.paths import expanded_path
from rankwise.processes.signals import reraise_from_handler
from rankwise.trainer.arguments import check_weights_only

T = TypeVar("T")
_OF_COMMAND_LINE = ("_instantiator", "_class_path")  # LightningCLI saves these beside the arguments
BUILD_SAME_MODULE = "build the module as it was when the checkpoint was written."
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@final
class LoadFromCheckpoint:
    """`load_from_checkpoint` of a class; to call it on an instance, which would not change, is an error."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load

    def __get__(self, instance: object, owner: type[T]) -> Callable[..., T]:
        return MethodType(self._load, owner) if instance is None else partial(_refuse, owner)


def _refuse(kind: type, *args: object, **kwargs: object) -> NoReturn:
    raise ConfigurationError(
        message=f"load_from_checkpoint() was called on an instance of {kind.__name__}, which stays as it is.",
        remedy=f"module = {kind.__name__}.load_from_checkpoint(path).",
    )


def load_from_checkpoint(
    kind: type[T],
    checkpoint_path: str | os.PathLike[str],
    map_location: Any = None,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool | None = True,
    **kwargs: Any,
) -> T:
    """Build a module from a checkpoint of this library, or from Lightning's, and load its weights.

    The constructor gets the checkpoint's hyperparameters that it accepts; `configure_model` runs next.

    Args:
        kind: the class on which this is called.
        checkpoint_path: the file; `weights_only=True` loads it.
        map_location: where its tensors go, as in `torch.load`; by default to the devices where they were, or
            to the CPU if these do not exist here. The module goes to the same device.
        hparams_file: hyperparameters to use instead: JSON, CSV with the columns key and value, or YAML (with
            the extra `yaml`).
        strict: whether it is an error, not a warning, if the names of the weights differ from the module's;
            None for the module's `strict_loading`.
        weights_only: as in Lightning; False is refused, as the file could run code.
        kwargs: arguments of the constructor, in place of the checkpoint's.

    Raises:
        CheckpointError: for a file that cannot be loaded, or does not fit the module.
        ConfigurationError: for arguments that the constructor needs and that nothing has.
        UnknownArgumentError: for one that it does not take.
        MissingExtraError: for YAML without PyYAML.
    """
    path, checkpoint = _read(checkpoint_path, map_location, weights_only)
    module: Any = _built(kind, checkpoint, path, hparams_file, MODULE_KEYS, kwargs)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    weights = weights_in(checkpoint, path)
    strict = module.strict_loading if strict is None else strict
    with loaded_into(type(module).__name__, path, "state_dict", RuntimeError, BUILD_SAME_MODULE):
        different = module.load_state_dict(weights, strict=strict)
    warn_of_different_weights(path, module, different.missing_keys, different.unexpected_keys)
    tensors = (tensor for tensor in weights.values() if isinstance(tensor, Tensor))
    if (first := next(tensors, None)) is not None:
        module.to(first.device)
    loaded: T = module
    return loaded


def load_data_module_from_checkpoint(
    kind: type[T],
    checkpoint_path: str | os.PathLike[str],
    map_location: Any = None,
    hparams_file: str | os.PathLike[str] | None = None,
    weights_only: bool | None = True,
    **kwargs: Any,
) -> T:
    """Build a data module from a checkpoint of this library, or from Lightning's, and load its state.

    Arguments and errors are the same as in `TrainingModule.load_from_checkpoint`, without `strict`.
    """
    path, checkpoint = _read(checkpoint_path, map_location, weights_only)
    datamodule = _built(kind, checkpoint, path, hparams_file, DATA_MODULE_KEYS, kwargs)
    load_data_module_state(datamodule, checkpoint, path)
    return datamodule


def load_data_module_state(datamodule: Any, checkpoint: Mapping[str, Any], path: str) -> None:
    """Load a data module's state from a checkpoint, if that has one, under the key that Lightning uses."""
    key = type(datamodule).__qualname__
    if key in checkpoint:
        with restored_from(path, f"state of {key}"):
            datamodule.load_state_dict(checkpoint[key])


def _read(path: Any, map_location: Any, weights_only: bool | None) -> tuple[str, dict[str, Any]]:
    """Return the path, and the checkpoint there."""
    check_is_a("checkpoint_path", path, (str, os.PathLike), "a path")
    check_weights_only(weights_only)
    found, where = os.fspath(path), _where_saved if map_location is None else map_location
    return found, TorchCheckpointIO().load_checkpoint(found, map_location=where)


def _built(
    kind: type[T],
    checkpoint: Mapping[str, Any],
    path: str,
    hparams_file: str | os.PathLike[str] | None,
    keys: tuple[str, str],
    given: Mapping[str, Any],
) -> T:
    """Call the constructor with the hyperparameters of a checkpoint, or of a file, and the given ones."""
    values, container = keys
    saved = checkpoint.get(values, {}) if hparams_file is None else read_file(hparams_file)
    with restored_from(path, "hyperparameters"):
        saved = dict(vars(saved) if isinstance(saved, Namespace) else saved)
        arguments = _arguments(kind, saved, checkpoint.get(container), given)
    return kind(**arguments)


def _where_saved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Leave a storage where it was saved, if that device exists; `torch.load` calls this."""
    device = torch.device(location)
    if device.type == "cuda":
        exists = (device.index or 0) < torch.cuda.device_count()
    else:
        exists = device.type == "cpu" or (device.type == "mps" and torch.backends.mps.is_available())
    return None if exists else storage


def _arguments(
    kind: Any, saved: Mapping[str, Any], container: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the constructor's arguments: the saved ones, or one that contains them, and the given ones."""
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    names = [each.name for each in parameters if each.kind not in _VARIABLE]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    others = {name: value for name, value in given.items() if name not in names}
    _check_not_nested(kind, saved, given)
    if container in names:
        arguments: dict[str, Any] = {container: AttributeDict({**saved, **others})}
    elif others and not takes_any:
        raise UnknownArgumentError(target=kind.__name__, name=next(iter(others)), known=tuple(names))
    else:
        taken = {name: value for name, value in saved.items() if name not in _OF_COMMAND_LINE} | others
        arguments = {name: value for name, value in taken.items() if takes_any or name in names}
    arguments |= {name: value for name, value in given.items() if name in names}
    needed = [each.name for each in parameters if each.name in names and each.default is each.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigurationError(
            message=f"{kind.__name__}() needs {missing}, which the checkpoint's hyperparameters do not have.",
            facts=f"it has the hyperparameters {sorted(map(str, saved))}.",
            remedy=f"{_call(kind, missing)}; to have them in checkpoints, self.save_hyperparameters() in the "
            "constructor.",
        )
    return arguments


def _check_not_nested(kind: type, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse class descriptions that LightningCLI has saved in place of objects."""
    nested = [name for name, value in saved.items() if isinstance(value, Mapping) and "class_path" in value]
    if "_instantiator" in saved and (left := [name for name in nested if name not in given]):
        raise ConfigurationError(
            message=f"The checkpoint describes the arguments {left} of {kind.__name__}() by the names of "
            "classes, as LightningCLI does; these are not imported.",
            remedy=f"{_call(kind, left)}.",
        )


def _call(kind: type, names: list[str]) -> str:
    return f"{kind.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in names)})"


def warn_of_different_weights(
    path: str, module: nn.Module, missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    """Warn on rank 0 of the names that only the module has (`missing`), and that only a file has."""
    if missing or unexpected:
        ranks.rank_zero_only(ranks.warn)(
            f"{path} and {type(module).__name__} have different weights. Only the module has {missing}, and "
            f"only the file has {unexpected}.",
        )


def weights_in(checkpoint: Mapping[str, Any], path: str) -> Any:
    """Return the state dictionary in a checkpoint; raise CheckpointError if there is none."""
    if "state_dict" not in checkpoint:
        raise CheckpointError(path=path, problem=f"holds no 'state_dict', but {sorted(map(str, checkpoint))}")
    return checkpoint["state_dict"]


@contextmanager
def loaded_into(target: str, path: str, part: str, kind: type[Exception], remedy: str = "") -> Iterator[None]:
    """Load `part` of a checkpoint in the block; a `kind` is raised as CheckpointError: it does not fit."""
    with restored_from(path, part):
        try:
            yield
        except kind as error:
            reraise_from_handler(error)
            problem = f"does not fit {target}: {error}"
            raise CheckpointError(path=path, problem=problem, remedy=remedy) from None


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the hyperparameters in a file."""
    file = expanded_path(path)
    readers = {".json": _read_json, ".csv": _read_csv, ".yaml": _read_yaml, ".yml": _read_yaml}
    check_value("hparams_file", str(path), file.suffix.lower() in readers, f"one of {[*readers]}")
    try:
        found = readers[file.suffix.lower()](file)
    except RankwiseError:
        raise
    except (OSError, ValueError, LookupError) as error:
        reraise_from_handler(error)
        raise _unreadable(file, f"could not be read: {error}") from error
    if not isinstance(found, dict):
        raise _unreadable(file, f"holds a {type(found).__name__}, not a mapping")
    return found


def _unreadable(file: Path, problem: str) -> CheckpointError:
    remedy = "pass a file with a mapping of names to plain values, or the arguments as keywords."
    return CheckpointError(path=str(file), problem=problem, remedy=remedy)


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def _read_csv(file: Path) -> dict[str, Any]:
    with file.open(newline="") as lines:
        return {line["key"]: _literal(line["value"]) for line in csv.DictReader(lines)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read_yaml(file: Path) -> Any:
    check_installed("yaml", "yaml", f"hparams_file={file.name!r}")
    import yaml

    try:
        return yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise _unreadable(file, f"is not YAML of plain values: {error}") from error
