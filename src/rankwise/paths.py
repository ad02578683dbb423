"""File names: absolute and unused ones, of source files of this package, of a run's last checkpoint."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from pathlib import Path

from rankwise.errors import ConfigurationError

__all__ = ["absolute_path", "expanded_path", "is_last_checkpoint", "path_in_package", "unused_checkpoint"]

_PACKAGE = str(Path(__file__).parent) + os.sep

_LAST = r"last(-v\d+)?\.ckpt"


def expanded_path(path: str | os.PathLike[str]) -> Path:
    """Return a path whose `~` is the home folder."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  leaves the name of an unknown user as it is


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path; `~` is the home folder.

    Raises:
        ConfigurationError: when a relative path has no absolute one.
    """
    try:
        return str(expanded_path(path).absolute())
    except OSError:
        raise ConfigurationError(
            message=f"The path {str(path)!r} is relative, but the working directory has been removed.",
            remedy="give an absolute path, or call os.chdir() with a folder that exists.",
        ) from None


def path_in_package(filename: str) -> str | None:
    """Return a source file's path from this package's folder on, or None for a file outside that folder.

    A user's folder may also be called `rankwise`, such as a clone of this project.
    """
    if not filename.startswith(_PACKAGE):
        return None
    return f"rankwise/{filename.removeprefix(_PACKAGE).replace(os.sep, '/')}"


def is_last_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is called as a run's last checkpoint: `last.ckpt`, `last-v1.ckpt` and so on."""
    return re.fullmatch(_LAST, Path(path).name) is not None


def unused_checkpoint(
    folder: str | os.PathLike[str], stem: str, taken: Collection[str] = (), own: Collection[str] = ()
) -> str:
    """Return the first of `stem.ckpt`, `stem-v1.ckpt`, ... that is not taken and, unless `own`, not there.

    A symbolic link is never our own: who writes there replaces the file that it names.
    """
    stems = itertools.chain([stem], (f"{stem}-v{version}" for version in itertools.count(1)))
    paths = (str(Path(folder) / f"{name}.ckpt") for name in stems)
    return next(
        path
        for path in paths
        if path not in taken and not (Path(path).is_symlink() if path in own else os.path.lexists(path))
    )
