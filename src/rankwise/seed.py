"""`seed_everything`: seed the random number generators of Python, torch and NumPy."""

from __future__ import annotations

import random
import sys

from rankwise.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["given_seed", "seed_everything"]

_HIGHEST = 2**32 - 1  # NumPy's
_given: int | None = None


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python, torch and, if it is imported, NumPy. Samplers that shuffle use the seed too.

    Models that are built afterwards have the same initial weights on every rank. In `Trainer.fit` each rank
    draws from its own stream (for dropout and augmentation), and so does each worker of its loader. Use the
    same seed on all ranks: a fit raises if seeds differ.

    Runs on: every process that needs the seed. Processes that a strategy starts inherit it.

    Args:
        seed: from 0 to 2**32 - 1.
        workers: for compatibility with Lightning; only True, since loader workers always use the seed.

    Returns:
        The seed.

    Raises:
        InvalidTypeError: if `seed` is not an integer.
        InvalidArgumentError: if `seed` is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidTypeError(argument="seed", value=seed, expected="a whole number")
    if not 0 <= seed <= _HIGHEST:
        raise InvalidArgumentError(argument="seed", value=seed, expected=f"a number from 0 to {_HIGHEST}")
    if workers is not True:
        raise InvalidArgumentError(
            argument="workers", value=workers, expected="True: loader workers always use the seed"
        )
    global _given
    import torch

    _given = seed
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    return seed


def given_seed() -> int | None:
    """Return the last argument of `seed_everything` in this process, or None."""
    return _given
