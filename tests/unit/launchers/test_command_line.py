"""What the interpreter was told to run, read from its true command line."""

import sys
from multiprocessing import process
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rankwise.errors import LaunchRefusedError
from rankwise.launchers import script_place
from rankwise.start import WORKING_DIRECTORY

_KERNEL = SimpleNamespace(get_ipython=object)


@pytest.mark.parametrize(
    ("words", "script"),
    [
        *((["python", *words, "train.py"], "train.py") for words in ([], ["-Xutf8", "-OO"], ["-W", "-c"])),
        *((["python", *words, "train.py"], "train.py") for words in (["-Xm"], ["-Wm"], ["-Werror", "-u"])),
        *((["python", *words], None) for words in ([], ["-"], ["-", "--flag"], ["-u", "-X", "utf8"], ["-i"])),
        (["python", "train.py", "-c", "x"], "train.py"),
        (["python", "-X", "utf8", "-O", "train.py", "-m"], "train.py"),
        (["python", "-W", "error", "dir/train.py"], "dir/train.py"),
        (["python", "--check-hash-based-pycs", "always", "train.py"], "train.py"),
        *((["python", "-m", "package.train", "--flag"], "-m"), (["python", "-mpackage.train"], "-m")),
        *((["python", "-Om", "package.train"], "-m"), (["python", "-c", "print()"], "-c")),
        (["python", "-Ic", "print()"], "-c"),
    ],
)
def test_what_is_run(words: list[str], script: str | None) -> None:
    """The script's path, `-m` or `-c`; None where it came through stdin."""
    assert script_place._script(words) == script


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give this process another `__main__`, whose file a test can set."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize(
    ("given", "full", "expected"),
    [
        *((given, f"/home/user/{given}", "/home/user") for given in ("train.py", "src/train.py")),
        ("./src/train.py", "/home/user/src/train.py", "/home/user"),
        *((given, "/home/user/train.py", WORKING_DIRECTORY) for given in ("/home/user/train.py", "-m")),
        ("../train.py", "/home/train.py", WORKING_DIRECTORY),
        *(("train.py", full, WORKING_DIRECTORY) for full in ("/home/user/other.py", "train.py", None)),
    ],
)
def test_where_it_was_started(given: str, full: str | None, expected: str, main: ModuleType) -> None:
    """The full path less what stands on the command line; otherwise where rankwise was imported."""
    if full is not None:
        main.__file__ = full
    assert script_place._original_directory(["python", given]) == expected


def test_the_command_is_the_true_one(monkeypatch: pytest.MonkeyPatch, main: ModuleType) -> None:
    """Flags and arguments are those of the command line, whatever became of `sys.argv`."""
    main.__file__ = str(Path.cwd() / "train.py")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-O", "train.py", "--flag", "a b"])
    monkeypatch.setattr(sys, "argv", ["changed"])
    monkeypatch.setitem(sys.modules, "ipykernel", _KERNEL)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # not imported to its end
    command = [sys.executable, "-O", "train.py", "--flag", "a b"]
    assert script_place.rerun_command() == (command, str(Path.cwd()))


@pytest.mark.parametrize(
    ("prepare", "text", "strategy"),
    [
        (
            lambda p: [p.setitem(sys.modules, each, _KERNEL) for each in ("ipykernel", "IPython")],
            *("in a notebook", "ddp_notebook"),
        ),
        (lambda p: p.setattr(sys, "ps1", ">>> ", raising=False), "in an interactive shell", "ddp_notebook"),
        (lambda p: p.setenv("PYTEST_CURRENT_TEST", "x"), "inside pytest", "ddp_spawn"),
        (lambda p: p.setattr(sys, "executable", ""), "where there is no Python executable", "ddp_spawn"),
        (lambda p: p.setattr(sys, "orig_argv", ["python"]), "came through stdin", "ddp_notebook"),
        (lambda p: p.setattr(process, "parent_process", object), "that multiprocessing started", "ddp_spawn"),
    ],
)
def test_what_cannot_be_run_again(
    prepare: object, text: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused by its reason, with the command line that was seen and what works there."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert callable(prepare)
    prepare(monkeypatch)
    with pytest.raises(LaunchRefusedError, match=text) as caught:
        script_place.rerun_command()
    assert repr(sys.orig_argv) in str(caught.value)
    assert f'use strategy="{strategy}".' in str(caught.value)
