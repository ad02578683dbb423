"""A copy of a project, with a Python environment whose programs import the copy."""

import shutil
import site
import sysconfig
import venv
from pathlib import Path

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", ".coverage*", "__pycache__")


def make_overlay(project: Path, folder: Path) -> tuple[Path, Path]:
    """Copy `project` into `folder`; return the copy and the Python that imports it.

    All that this Python starts with `sys.executable` imports the copy too, with any environment variables.
    It takes the other packages from the environment of this process.
    """
    copy = folder / "copy"
    shutil.copytree(project, copy, ignore=NOT_COPIED)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    installed = sorted({sysconfig.get_path("purelib"), *site.getsitepackages()})
    lines = [str(copy / "src"), *(f"import site; site.addsitedir({path!r})" for path in installed)]
    (packages / "overlay.pth").write_text("\n".join(lines) + "\n")
    return copy, folder / "venv" / "bin" / "python"
