"""Where each rank is: its step, its phase, its stacks."""

__all__: list[str] = []
