"""rankwise inside other frameworks: one package for each, which needs the extra of its name."""

__all__: list[str] = []
