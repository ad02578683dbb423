"""Key-value stores through which ranks exchange small values."""

__all__: list[str] = []
