"""Paths: local ones and those with a scheme, of source files of this package, of checkpoints."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

from rankwise.errors import ConfigurationError

_PACKAGE = str(Path(__file__).parent) + os.sep
# pathlib makes one slash of several: "s3:/bucket/run".
_SCHEME = re.compile(r"([A-Za-z][\w+.:-]+):/")
_URL = re.compile(rf"{_SCHEME.pattern}/")


def expanded_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path whose `~` is the home folder; raise if it has a scheme, as `s3://bucket/run`."""
    if found := _SCHEME.match(os.fspath(path)):
        raise ConfigurationError(
            message=f"The path {os.fspath(path)!r} has the scheme {found[1]!r}, but it must be a local path.",
            remedy="give a local path. Checkpoints can be elsewhere: pass the path as a string with both "
            "slashes, and Trainer(plugins=[...]) a CheckpointIO for that storage, which defines "
            "has_checkpoint and list_checkpoints too; see docs/checkpoints.md.",
        )
    return Path(os.path.expanduser(path))  # noqa: PTH111  leaves the name of an unknown user as it is


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute local path; raise if there is none, and if the path has a scheme."""
    try:
        return str(expanded_path(path).absolute())
    except OSError:
        raise ConfigurationError(
            message=f"The path {str(path)!r} is relative, but the working directory has been removed.",
            remedy="give an absolute path, or call os.chdir() with a folder that exists.",
        ) from None


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a checkpoint, or of a folder of them; one with a scheme stays as it is."""
    given = os.fspath(path)
    return given if _URL.match(given) else absolute_path(given)


def join_path(folder: str, name: str) -> str:
    """Return the path of `name` in `folder`, which may have a scheme."""
    if _URL.match(folder):
        return f"{folder}{'' if folder.endswith('/') else '/'}{name}"
    return str(Path(folder) / name)


def is_path_below(path: str, folder: str) -> bool:
    """Return whether a path is in a folder or in a folder below it, by the paths alone."""
    return Path(path).is_relative_to(folder) and ".." not in Path(path).relative_to(folder).parts


def is_symbolic_link(path: str) -> bool:
    """Return whether a symbolic link is at a local path; there is none at a path with a scheme."""
    return not _URL.match(path) and Path(path).is_symlink()


def path_in_package(filename: str) -> str | None:
    """Return a source file's path from this package's folder on, or None for a file outside that folder."""
    if not filename.startswith(_PACKAGE):  # it may be in another folder that is called rankwise
        return None
    return f"rankwise/{filename.removeprefix(_PACKAGE).replace(os.sep, '/')}"


def is_last_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is called as a run's last checkpoint: `last.ckpt`, `last-v1.ckpt` and so on."""
    return re.fullmatch(r"last(-v\d+)?\.ckpt", Path(path).name) is not None


def unused_checkpoint(folder: str, stem: str, is_used: Callable[[str], bool]) -> str:
    """Return the path of the first of `stem.ckpt`, `stem-v1.ckpt`, ... in `folder` that is not used."""
    stems = itertools.chain([stem], (f"{stem}-v{version}" for version in itertools.count(1)))
    paths = (join_path(folder, f"{name}.ckpt") for name in stems)
    return next(path for path in paths if not is_used(path))
