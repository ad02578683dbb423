"""What a test needs beside the library: absent, it skips; but not in CI, where everything has to run."""

from __future__ import annotations

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
    """Skip where a package is not installed, without importing any; in CI that is an error.

    For tests whose programs import them: that may take seconds.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            missing = f"{name} is not installed"
            (pytest.fail if is_ci() else pytest.skip)(missing)


def is_ci() -> bool:
    """Whether this is a run of CI, as `.ci/run` sees it: `CI` is set, and not to false."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
