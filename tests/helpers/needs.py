"""What a test needs beside the library: absent, it skips; but not in CI, where everything has to run."""

import importlib
import importlib.util
import os

import pytest


def need_package(name: str) -> None:
    """Skip what is collected now where a package cannot be imported; in CI that is an error."""
    if is_ci():
        importlib.import_module(name)
    else:
        pytest.importorskip(name)


def need_installed(*names: str) -> None:
    """Skip a test, or a module that calls this, where a package is not installed; in CI that is an error.

    The packages are not imported, which takes seconds with some and would delay each collection.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            missing = f"{name} is not installed"
            if is_ci():
                pytest.fail(missing)
            pytest.skip(missing, allow_module_level=True)


def is_ci() -> bool:
    """Whether this is a run of CI, as `.ci/run` sees it: `CI` is set, and not to false."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
