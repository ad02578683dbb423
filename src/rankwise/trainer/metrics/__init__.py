"""Logged values and metric objects, reduced over batches and ranks."""

__all__: list[str] = []
