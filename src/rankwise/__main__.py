"""`python -m rankwise doctor`, `python -m rankwise strategies`."""

import sys

from rankwise.doctor import main

if __name__ == "__main__":  # a spawned rank imports this file too
    sys.exit(main(sys.argv[1:]))
