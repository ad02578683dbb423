"""The command line that runs this script again, and the number of its launches."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankwise.start import WORKING_DIRECTORY

_NOTEBOOK, _SHELL, _STDIN = (
    "in a notebook",
    "in an interactive shell",
    "with a script that came through stdin",
)
_WITHOUT_FILE = (_NOTEBOOK, _SHELL, _STDIN)


def rerun_command() -> tuple[list[str], str]:
    """Return the command and the directory that this process was started with, or raise `LaunchRefusedError`.

    Interpreter flags, `-m`, `-c` and a changed `sys.argv` survive: `sys.orig_argv` is the true command line.
    """
    if (problem := _problem(sys.orig_argv)) is not None:
        from rankwise.errors import LaunchRefusedError

        # A spawned process cannot import what a notebook, a shell or stdin defines.
        name = "ddp_notebook" if problem in _WITHOUT_FILE else "ddp_spawn"
        raise LaunchRefusedError(
            message=f'strategy="ddp" runs the script again for each rank, which cannot work {problem}.',
            facts=f"the command line is {sys.orig_argv!r}.",
            remedy=f'use strategy="{name}".',
        )
    return [sys.executable, *sys.orig_argv[1:]], _original_directory(sys.orig_argv)


def _problem(command: Sequence[str]) -> str | None:
    import multiprocessing.process

    if "ipykernel" in sys.modules and "IPython" in sys.modules and _in_kernel():
        return _NOTEBOOK
    if "ps1" in sys.__dict__ or sys.flags.interactive:
        return _SHELL
    # A script that a test starts has the variable, but not the module.
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:
        return "inside pytest"
    if multiprocessing.process.parent_process() is not None:
        return "in a process that multiprocessing started"
    if not sys.executable:
        return "where there is no Python executable"
    if _script(command) is None:
        return _STDIN
    if not os.path.isdir(_original_directory(command)):  # noqa: PTH112  "" is none, and Path("") is one
        return "where the folder that it was started in has been removed"
    return None


def _in_kernel() -> bool:
    from IPython import get_ipython  # type: ignore[import-not-found,unused-ignore]  # there when this is called

    return get_ipython() is not None


def _script(command: Sequence[str]) -> str | None:
    """Return the argument that says what the interpreter runs: a path, `-m` or `-c`; None for stdin."""
    words = iter(command[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif word == "-" or not word.startswith("-"):
            return None if word == "-" else word
        elif not word.startswith("--") and (letter := _running_flag(word)):
            return letter
    return None


def _running_flag(word: str) -> str | None:
    """Return `-m` or `-c` where a cluster of short flags, such as `-Om`, ends in one."""
    for letter in word[1:]:
        if letter in "mc":
            return f"-{letter}"
        if letter in "WX":
            return None  # the rest is that option's value
    return None


def _original_directory(command: Sequence[str]) -> str:
    """Return the directory in which the process was started: the script's full path less the given one."""
    script = _script(command) or ""
    full = getattr(sys.modules["__main__"], "__file__", None)
    if script.startswith("-") or full is None or Path(script).is_absolute() or not Path(full).is_absolute():
        return WORKING_DIRECTORY
    parts, given = Path(full).parts, Path(os.path.normpath(script)).parts
    if ".." in given or parts[-len(given) :] != given:
        return WORKING_DIRECTORY
    return str(Path(*parts[: -len(given)]))


_launches = 0


def launch_count() -> int:
    """Return how many launches this process has begun, failed ones included."""
    return _launches


def count_launch() -> int:
    """Count one more launch; return how many were begun before."""
    global _launches
    _launches += 1
    return _launches - 1
