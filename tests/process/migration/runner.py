"""Run scripts one after another in one process, each in a folder of its own; say how each ended.

python runner.py SCRIPTS RESULTS [NAME ...] [-- ARGUMENT ...]

`RESULTS/NAME.json` holds `{"error": null}`, or the last lines of a traceback; `RESULTS/NAME.pt` is what the
script recorded.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def run(script: Path, results: Path, arguments: list[str]) -> str | None:
    """Run a script as a program; return its traceback, if it failed."""
    folder = results / script.stem
    folder.mkdir(parents=True)
    sys.argv = [str(script), "--out", str(results / f"{script.stem}.pt"), *arguments]
    for name in ("shared", script.stem):  # the arguments are read once per run
        sys.modules.pop(name, None)
    try:
        os.chdir(folder)
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:  # a script may end in any way
        return traceback.format_exc()
    return None


def main() -> None:
    """Run the scripts that the command line names, or all."""
    given = sys.argv[1:]
    arguments = given[given.index("--") + 1 :] if "--" in given else []
    scripts, results, *names = given[: given.index("--")] if "--" in given else given
    sys.path.insert(0, str(Path(scripts).resolve()))
    paths = sorted(Path(scripts).resolve().glob("*.py"))
    for path in paths:
        if path.stem not in ("__init__", "shared") and (not names or path.stem in names):
            error = run(path, Path(results).resolve(), arguments)
            (Path(results).resolve() / f"{path.stem}.json").write_text(json.dumps({"error": error}))
            print(path.stem, "failed" if error else "ran", flush=True)


if __name__ == "__main__":
    main()
