"""What `import rankwise` does at once: record the working directory, and import names on first use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

try:
    WORKING_DIRECTORY = os.getcwd()  # noqa: PTH109 -- pathlib takes longer to import
except OSError:
    WORKING_DIRECTORY = ""  # it has been removed

# Set by the main process of strategy "ddp" for the scripts that it runs again.
CONTEXT_VARIABLE = "RANKWISE_WORKER"

JOB_KEY = "RANKWISE_JOB_KEY"
"""The environment variable with a job's key where no launcher of rankwise gives the ranks one."""

# Set in such a script: returns the random state of the main process when it imported `rankwise.seed`.
main_random_state: Callable[[], Any] | None = None


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect no garbage in the block: each collection of an import would walk all of torch's objects."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def lazy_names(package: str, names_by_module: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports a name from its module on first use, and keeps it.

    `names_by_module` has the names of each module, with spaces between them. A name whose module is called
    like it stands for that module.
    """
    homes = {name: module for module, names in names_by_module.items() for name in names.split()}

    def import_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collections_paused():
            module = import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name
