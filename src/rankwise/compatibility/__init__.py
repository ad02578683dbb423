"""Names, objects and files of other libraries."""

__all__: list[str] = []
