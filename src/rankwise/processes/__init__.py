"""Helpers around processes and signals of the operating system."""

__all__: list[str] = []
