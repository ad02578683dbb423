"""Write a file atomically: a reader gets the previous file or the new one, also after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rankwise.errors import CheckpointError
from rankwise.paths import expanded_path

_OPEN_FILES = "/proc/self/fd"
_MAX_LINKS = 40  # as Linux has it
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
_SUFFIX_BYTES = 4
_TEMPORARY_NAMES = f".rankwise-{'[0-9a-f]' * 2 * _SUFFIX_BYTES}.tmp"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` if the block succeeds, and is deleted otherwise.

    Several processes may write to one path or folder at once: the last one replaces the others' file. The new
    file has the permissions of the one that it replaces, if that has the same owner.

    Raises:
        CheckpointError: when something else than a file is at `path`, or the link of another user is in it.
    """
    target = _target_of(path)
    _remove_abandoned(target.parent)
    file, temporary = _open_temporary(target.parent)
    with file:
        try:
            _copy_permissions(target, file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if temporary is None and not _link(file, target):
                temporary = _temporary_name(target.parent)
                _link(file, temporary)
            if temporary is not None:
                temporary.replace(target)  # while it is locked
        except BaseException:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise
    _flush_folder(target.parent)


def link_file(existing: Path, path: str | os.PathLike[str]) -> None:
    """Replace `path` by a hard link to a file, or by a copy where that is not possible; see `replacing`."""
    target = _target_of(path)
    temporary = _temporary_name(target.parent)
    with existing.open("rb") as source:
        _lock(source, fcntl.LOCK_SH)  # both names: no other process takes the new one for abandoned
        try:
            temporary.hardlink_to(existing)
        except OSError:  # another file system, or one without such links
            with replacing(target) as file:
                shutil.copyfileobj(source, file)
            return
        try:
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)  # stays where `target` was that file already
    _flush_folder(target.parent)


def _target_of(path: str | os.PathLike[str]) -> Path:
    """Return the path behind symbolic links, which stay; make its folder."""
    given = expanded_path(path).absolute()
    _check_links(given, set())
    target = given.resolve()
    check_regular_file(target, "pass a path where there is no file yet, or a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _check_links(path: Path, checked: set[Path]) -> None:
    """Raise if a symbolic link on the way to `path` may come from somebody who cannot write to its target.

    The kernel has this rule for sticky folders (`fs.protected_symlinks`), but not for who resolves a link.
    """
    for place in (path, *path.parents):
        if place in checked or not place.is_symlink():
            continue
        checked.add(place)
        if len(checked) > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(place))
        folder, owner = place.parent.stat(), place.lstat().st_uid
        if folder.st_mode & _OTHERS_WRITE and owner not in (folder.st_uid, os.geteuid(), _ROOT):
            raise CheckpointError(
                path=os.fspath(path),
                problem=f"{place} is a symbolic link of another user (uid {owner}), in a folder where others "
                f"may write: it may name any file of yours",
                remedy=f"pass the path to which it points, {place.readlink()}, if you trust that; or use a "
                "folder where only you may write.",
            )
        _check_links(place.parent / place.readlink(), checked)


def check_regular_file(path: Path, remedy: str) -> None:
    """Raise where a folder, a device, a pipe or a socket is at `path`."""
    try:
        mode = path.stat().st_mode
    except OSError:  # there is nothing, or what uses it reports why
        return
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "device, pipe or socket"
        raise CheckpointError(path=os.fspath(path), problem=f"is a {kind}, not a file", remedy=remedy)


def _copy_permissions(source: Path, file: IO[bytes]) -> None:
    """Let no others read the new file than could read the file that it replaces, if it has the same owner."""
    with suppress(FileNotFoundError):
        replaced = source.lstat()
        if replaced.st_uid == os.fstat(file.fileno()).st_uid:
            os.fchmod(file.fileno(), stat.S_IMODE(replaced.st_mode))


def _open_temporary(folder: Path) -> tuple[IO[bytes], Path | None]:
    """Open a locked file; without a name if possible, so that a killed process leaves none."""
    flag = getattr(os, "O_TMPFILE", None)  # Linux has it
    if flag is not None and Path(_OPEN_FILES).exists():
        with suppress(OSError):
            file = open(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")  # noqa: PTH123, SIM115 -- replacing closes it; a descriptor has no path
            _lock(file)
            return file, None
    while True:
        temporary = _temporary_name(folder)
        file = temporary.open("x+b")
        if _lock(file) and temporary.exists():
            return file, temporary
        file.close()  # another process has taken it for abandoned before it was locked


def _temporary_name(folder: Path) -> Path:
    return folder / f".rankwise-{secrets.token_hex(_SUFFIX_BYTES)}.tmp"


def _link(file: IO[bytes], path: Path) -> bool:
    """Give a file without a name one; return False where another file has it."""
    try:
        os.link(f"{_OPEN_FILES}/{file.fileno()}", path, src_dir_fd=file.fileno())
    except FileExistsError:
        return False
    return True


def _lock(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file while it is open; return False where another process has locked it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # locks are not supported
        return True
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote into a folder."""
    for temporary in folder.glob(_TEMPORARY_NAMES):
        with suppress(OSError), os.fdopen(os.open(temporary, _TO_LOCK), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()


_TO_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # NFS locks only what is open for writing


def _flush_folder(folder: Path) -> None:
    """Flush new names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not supported by some network file systems
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
