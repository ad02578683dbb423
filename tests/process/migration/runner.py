"""Run scripts one after another in one process, each in a folder of its own; say how each ended.

python runner.py SCRIPTS RESULTS NAMES [ARGUMENT ...] [-- RESULTS NAMES [ARGUMENT ...]] ...

Each `--` begins another round, with other arguments. `RESULTS` is an absolute path, and `NAMES` are separated
by commas. `RESULTS/NAME.json` holds `{"error": null}`, or a traceback; `RESULTS/NAME.pt` is what the script
recorded.
"""

import json
import os
import runpy
import sys
import traceback
from itertools import groupby
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
    """Run the scripts in each round that the command line asks for."""
    scripts, *given = sys.argv[1:]
    sys.path.insert(0, scripts)
    rounds = [list(part) for is_end, part in groupby(given, "--".__eq__) if not is_end]
    for results, names, *arguments in rounds:
        for name in names.split(","):
            error = run(Path(scripts, f"{name}.py"), Path(results), arguments)
            Path(results, f"{name}.json").write_text(json.dumps({"error": error}))
            print(name, "failed" if error else "ran", flush=True)


if __name__ == "__main__":
    main()
