"""Reports, and what they say about a mapping of variables."""
