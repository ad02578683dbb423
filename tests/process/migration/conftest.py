"""The scripts of this folder are programs for Lightning: pytest does not import them for their examples."""

collect_ignore = ["scripts", "runner.py"]
