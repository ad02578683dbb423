"""`TrainingShare`: one rank's training batches, which can begin anywhere in an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from typing_extensions import final

from rankwise.data import BatchStream, ShardedSampler, is_shardable, sharded_sampler_of, with_batch_stream
from rankwise.data.random_state import isolated_random_state, mixed_seed
from rankwise.errors import ConfigurationError
from rankwise.trainer.loaders import LoaderShare, has_certain_length, length_of, limited

if TYPE_CHECKING:
    from rankwise.trainer.progress import Progress
    from rankwise.trainer.trainer import Trainer

__all__ = ["TrainingShare", "ended_early"]

_END = object()


@final
class TrainingShare:
    """This rank's batches of an epoch, from the first or from where an earlier run has stopped.

    What the batches are depends on the seed (of a user's generator, where there is one) and the epoch alone,
    not on what else draws random numbers; so do the numbers that a loader's workers draw. An iterable data
    set, which has no indices, is replayed.

    Args:
        trainer: knows the limits and this rank's place.
        share: this rank's part of the loader.
        seed: of the training run.

    Attributes:
        num_batches: how many batches the epoch has on this rank, those of an earlier run included.
        is_certain: whether that number is known; where it is not, it is the most that are run.
        samples_per_batch: how many items of the stream of indices all ranks together take for a batch.
    """

    def __init__(self, trainer: Trainer, share: LoaderShare, seed: int) -> None:
        self._limit = trainer.limits["train"]
        self._seed, self._rank = seed, trainer.global_rank
        given: Any = share.loader
        generator = getattr(given, "generator", None)
        if generator is not None:
            self._seed = mixed_seed(seed, generator.initial_seed())
        self.loader: Any = with_batch_stream(given, seed=seed, rank=self._rank, worker_seed=self._seed)
        self._share = LoaderShare(self.loader, share.num_batches)
        self.num_batches = share.num_batches
        self.is_certain = has_certain_length(given)
        self.samples_per_batch = _samples_per_batch(self.loader, trainer)
        self._replayed = 0

    def place(self, progress: Progress) -> None:
        """Let the next start be where `progress` is within the current epoch."""
        done, self._replayed = progress.batches_done, 0
        self._share.set_epoch(progress.current_epoch)
        sampler, stream = sharded_sampler_of(self.loader), getattr(self.loader, "batch_sampler", None)
        if isinstance(stream, BatchStream):
            stream.first, stream.skipped = done, 0 if sampler is not None else done
        if sampler is not None:
            sampler.skip = progress.samples_done
        elif not isinstance(stream, BatchStream):
            self._replayed = done
        left = length_of(self.loader) + (0 if self._replayed else done)
        self.num_batches = limited(left, self._limit)

    def start(self, progress: Progress) -> Iterator[tuple[Any, bool]]:
        """Start the loader's workers, if it has any; return each batch, and whether it is the last.

        The random state of this process is as before afterwards, but for data sets that are replayed.
        """
        seed = mixed_seed(self._seed, progress.current_epoch, self._rank)
        generator = getattr(self.loader, "generator", None)
        with isolated_random_state(seed, *([] if generator is None else [generator])):
            batches = iter(self.loader)
        for _ in range(self._replayed):
            next(batches, None)
        left = self.num_batches - progress.batches_done
        return self._counted(batches, int(left)) if self._is_exact else _one_ahead(batches, left)

    @property
    def _is_exact(self) -> bool:
        """Whether batches are loaded in this process, and their number is known.

        Then none may be loaded ahead: what it draws belongs behind what the training step draws.
        """
        is_here = isinstance(self.loader, DataLoader) and self.loader.num_workers == 0
        return is_here and is_shardable(self.loader) and not math.isinf(self.num_batches)

    def _counted(self, batches: Iterator[Any], left: int) -> Iterator[tuple[Any, bool]]:
        for number in range(left):
            batch = next(batches, _END)
            if batch is _END:
                raise ended_early(self.num_batches, self.num_batches - left + number)
            yield batch, number + 1 == left


def ended_early(length: float, count: float) -> ConfigurationError:
    """Return the error for a loader that has fewer batches than it says."""
    return ConfigurationError(
        message=f"The training loader has a length of {length:g} batches, but it ended after {count:g}.",
        remedy="let __len__ of its sampler or batch sampler say how many there are.",
    )


def _one_ahead(batches: Iterator[Any], left: float) -> Iterator[tuple[Any, bool]]:
    if left <= 0:
        return
    following, count = next(batches, _END), 1
    while following is not _END:
        batch, following = following, next(batches, _END) if count < left else _END
        count += 1
        yield batch, following is _END


def _samples_per_batch(loader: Any, trainer: Trainer) -> int:
    replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    stream = getattr(loader, "batch_sampler", None)
    if not isinstance(stream, BatchStream) or not isinstance(stream.sampler, ShardedSampler):
        return replicas  # whole batches are dealt out, or nothing is
    return replicas * int(stream.batches.batch_size)
