"""Change the source in small ways, one at a time, and see whether a test fails."""
