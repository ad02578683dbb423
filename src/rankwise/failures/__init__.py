"""What failed first."""

__all__: list[str] = []
