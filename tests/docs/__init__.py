"""The README, the docs and the examples, run as written."""
