"""Seed everything that draws random numbers."""

from __future__ import annotations

import random
import sys

from rankwise.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["given_seed", "seed_everything"]

_HIGHEST = 2**32 - 1  # NumPy's
_given: int | None = None


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python, torch and (where it is imported) NumPy; shuffled samplers follow it too.

    Models that are built after it begin with the same weights on every rank. In `Trainer.fit` each rank then
    draws from a stream of its own, for dropout and augmentation, and each worker of its loader from another;
    so give all ranks one seed: a fit refuses different ones.

    Runs on: every process that is to have this seed. Processes that a strategy starts take it over.

    Args:
        seed: from 0 to 2**32 - 1.
        workers: accepted for Lightning's sake; only True, as loaders' workers always follow the seed.

    Returns:
        The seed.

    Raises:
        InvalidTypeError: when it is no whole number.
        InvalidArgumentError: when it is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidTypeError(argument="seed", value=seed, expected="a whole number")
    if not 0 <= seed <= _HIGHEST:
        raise InvalidArgumentError(argument="seed", value=seed, expected=f"a number from 0 to {_HIGHEST}")
    if workers is not True:
        raise InvalidArgumentError(
            argument="workers", value=workers, expected="True: loaders' workers always follow the seed"
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
    """Return what `seed_everything` was last called with in this process, or None."""
    return _given
