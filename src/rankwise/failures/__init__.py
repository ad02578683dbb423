"""Failure records: what failed first, and its exchange between nodes."""

__all__: list[str] = []
