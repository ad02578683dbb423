"""The main process of a job of the table of failures, and with `--rank` a rank that it runs again."""

import sys

from tests.process.fault_tasks import fit, from_json, run_as_main

if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        fit(*from_json(sys.argv[2]))
    else:
        run_as_main(*from_json(sys.argv[1]))
