"""`CombinedLoader`: several loaders as one, whose batches have the loaders' structure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, final

from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankwise.compatibility.names import MissingAttribute
from rankwise.data.sampler import length_of
from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError
from rankwise.nested import contained, map_nested, walked

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
Row = list[Any]
_END: Any = object()

_LENGTHS: Mapping[str, Callable[[Iterable[float]], float]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}


@final
class CombinedLoader:
    """Several loaders as one; iterating yields `(batch, batch_idx, dataloader_idx)`.

    A batch has the structure of `iterables`, with a batch of each loader in its place; in the mode
    `"sequential"` it is a batch of one loader, whose number is `dataloader_idx`. Elsewhere that is 0.

    Args:
        iterables: loaders, or other iterables over batches, in dictionaries, lists and tuples.
        mode: when it ends. `"min_size"`: with the shortest loader. `"max_size_cycle"`: with the longest;
            shorter ones begin again. `"max_size"`: with the longest; there is None for those that have ended.
            `"sequential"`: each loader is read to its end, one after another.

    Attributes:
        iterables, mode: the arguments.
        flattened: the loaders, in their order.

    Raises:
        UnknownNameError: for another mode.
        InvalidTypeError: for a value that cannot be iterated over, and for a `CombinedLoader` within another.

    Example:
        >>> loaders = {"a": range(3), "b": range(10, 12)}
        >>> for batch, batch_idx, _ in CombinedLoader(loaders, "max_size_cycle"):
        ...     print(batch_idx, batch)
        0 {'a': 0, 'b': 10}
        1 {'a': 1, 'b': 11}
        2 {'a': 2, 'b': 10}
    """

    limits = MissingAttribute(
        "CombinedLoader",
        "limits",
        "Trainer(limit_train_batches=2); in a loop of your own itertools.islice.",
    )
    reset = MissingAttribute("CombinedLoader", "reset", "iter(loader), which begins a new pass.")

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in _LENGTHS:
            raise UnknownNameError(kind="mode of CombinedLoader", name=mode, known=tuple(_LENGTHS))
        self.iterables = iterables
        self.mode: Mode = mode
        self.flattened: list[Any] = []
        self._structure = _numbered(iterables, self.flattened)
        for loader in self.flattened:
            check_iterable(loader)
            if isinstance(loader, CombinedLoader):
                expected = "loaders in dictionaries, lists and tuples; one CombinedLoader takes all of them"
                raise InvalidTypeError(argument="iterables", value=loader, expected=expected)

    @property
    def sampler(self) -> Any:
        """The loaders' samplers, in the structure of `iterables`."""
        return self.restored([getattr(loader, "sampler", None) for loader in self.flattened])

    @property
    def batch_sampler(self) -> Any:
        """The loaders' batch samplers, in the structure of `iterables`."""
        return self.restored([getattr(loader, "batch_sampler", None) for loader in self.flattened])

    def restored(self, items: Sequence[Any]) -> Any:
        """Return items, one for each loader, in the structure of `iterables`."""
        return map_nested(self._structure, int, items.__getitem__, each_place=True)

    def length(self, lengths: Sequence[float]) -> float:
        """Return the number of batches, if the loaders have `lengths`; `inf` for unknown."""
        return _LENGTHS[self.mode](lengths) if lengths else 0

    def __len__(self) -> int:
        length = self.length([length_of(loader) for loader in self.flattened])
        if math.isinf(length):
            raise TypeError(f"a CombinedLoader of the mode {self.mode!r} with a loader that has no length")
        return int(length)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self.mode == "sequential":
            for number, loader in enumerate(self.flattened):
                for batch_idx, batch in enumerate(loader):
                    yield batch, batch_idx, number
            return
        starts = [lambda _, loader=loader: iter(loader) for loader in self.flattened]
        for batch_idx, row in enumerate(rows(self.mode, starts)):
            yield self.restored(row), batch_idx, 0


def rows(
    mode: Mode, starts: Sequence[Callable[[int], Iterator[Any]]], passes: Sequence[int] | None = None
) -> Iterator[Row]:
    """Yield a batch of each loader at a time, by a mode that is not sequential.

    Each of `starts` begins a pass over its loader, and takes its number: first the one in `passes`, or 0.
    """
    first = [0] * len(starts) if passes is None else passes
    iterators = [start(number) for start, number in zip(starts, first, strict=True)]
    if mode == "min_size":
        return map(list, zip(*iterators))  # noqa: B905  the shortest ends it
    if mode == "max_size":
        return map(list, zip_longest(*iterators))
    return _cycled(starts, iterators, list(first))


def _cycled(
    starts: Sequence[Callable[[int], Iterator[Any]]], iterators: list[Iterator[Any]], passes: list[int]
) -> Iterator[Row]:
    """Yield rows until each loader has ended once; those that have ended begin again."""
    has_ended = [number > 0 for number in passes]
    while True:
        row = []
        for number, iterator in enumerate(iterators):
            batch = next(iterator, _END)
            if batch is _END:
                has_ended[number] = True
                if all(has_ended):
                    return
                passes[number] += 1
                iterators[number] = starts[number](passes[number])
                batch = next(iterators[number], _END)
            if batch is _END:
                raise ConfigurationError(
                    message=f"Loader {number} of several has no batch, so it cannot begin again.",
                    facts='with the mode "max_size_cycle" a loader that has ended begins again.',
                    remedy="give it data that can be read again, which a generator cannot; or choose another "
                    "mode.",
                )
            row.append(batch)
        yield row


def check_iterable(loader: Any) -> None:
    """Raise InvalidTypeError for a value that is not iterable, and for a data set, which has no batches."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        remedy = "torch.utils.data.DataLoader(dataset, batch_size=32)."
        raise InvalidTypeError(argument="dataloaders", value=loader, expected="a DataLoader", remedy=remedy)
    if isinstance(loader, Iterable) or callable(getattr(loader, "__getitem__", None)):
        return
    expected = "a DataLoader, an iterable over batches, or several DataLoaders"
    is_datamodule = callable(getattr(loader, "train_dataloader", None))
    remedy = "derive it from rankwise.DataModule" if is_datamodule else ""
    raise InvalidTypeError(argument="dataloaders", value=loader, expected=expected, remedy=remedy)


def is_collection(given: Any) -> bool:
    """Return whether a value is a container of loaders; a list without any `DataLoader` is one of batches."""
    if isinstance(given, Mapping):
        return True
    kinds = (DataLoader, CombinedLoader)
    return isinstance(given, (list, tuple)) and (
        not given or any(isinstance(each, kinds) for each in walked(given))
    )


def _numbered(collection: Any, leaves: list[Any]) -> Any:
    """Return a collection with numbers in place of its loaders, which are appended to `leaves`."""
    items = contained(collection)
    if items is None or (items and all(isinstance(item, (int, float, str)) for item in items)):
        leaves.append(collection)
        return len(leaves) - 1
    numbers = [_numbered(item, leaves) for item in items]
    if isinstance(collection, Mapping):
        return dict(zip(collection, numbers, strict=True))
    kind: Any = type(collection)
    return kind(*numbers) if getattr(kind, "_fields", None) else kind(numbers)
