"""The commands `python -m rankwise doctor` and `python -m rankwise strategies`."""

import sys

from rankwise.doctor import main

if __name__ == "__main__":  # spawned ranks import this file too
    sys.exit(main(sys.argv[1:]))
