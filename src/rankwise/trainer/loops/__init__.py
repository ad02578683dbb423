"""The loops of the Trainer."""

__all__: list[str] = []
