"""What needs Lightning in this folder has no examples: pytest does not import it for them."""

collect_ignore = ["recording.py", "scripts", "runner.py"]
