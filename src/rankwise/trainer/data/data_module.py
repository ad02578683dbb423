"""`DataModule`: the loaders of all stages, and how their data are prepared, in one object."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Self

from rankwise.checks import check_is_a
from rankwise.hyperparameters import HyperparametersMixin
from rankwise.nested import contained, map_nested, walked
from rankwise.trainer.data.data_hooks import DataHooks
from rankwise.trainer.module_loading import LoadFromCheckpoint, load_data_module_from_checkpoint

if TYPE_CHECKING:
    from rankwise.trainer import Trainer


class DataModule(HyperparametersMixin, DataHooks):
    """The source of the loaders in `Trainer.fit(model, datamodule=...)`; subclass it.

    A stage calls `prepare_data` in one process of each node, then `setup` and the method of its loaders on
    every rank, and `teardown` at the end. Loaders need no `DistributedSampler`: each rank gets its part.

    Example:
        >>> class Numbers(DataModule):
        ...     def __init__(self, batch_size=2):
        ...         super().__init__()
        ...         self.save_hyperparameters()
        ...
        ...     def setup(self, stage):
        ...         self.numbers = list(range(10))
        ...
        ...     def train_dataloader(self):
        ...         return DataLoader(self.numbers, self.hparams.batch_size, shuffle=True)
        >>> Numbers(batch_size=5).hparams
        {'batch_size': 5}

    Attributes:
        name: a name, for your own use.
    """

    name: str | None = None
    load_from_checkpoint = LoadFromCheckpoint(load_data_module_from_checkpoint)

    def __init__(self) -> None:
        super().__init__()
        self._trainer = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy without the trainer."""
        return {**self.__dict__, "_trainer": None}

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that last used this data module; None without one."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Make a data module of data sets; the loader of training batches shuffles, if it can.

        Args:
            train_dataset: a data set, or several in lists and dictionaries; None for no such loader.
            val_dataset: the same for validation.
            test_dataset: the same for test.
            predict_dataset: the same for prediction.
            batch_size: of every loader; the constructor gets it too, if it takes it.
            num_workers: the same for the number of worker processes.
            kwargs: for the constructor.

        Raises:
            InvalidTypeError: for a value that is not a data set.
        """
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, datasets in given.items():
            _check_datasets(f"{name}_dataset", datasets)
        parameters = inspect.signature(cls.__init__).parameters.values()
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        own = {"batch_size": batch_size, "num_workers": num_workers}
        known = {each.name for each in parameters}
        datamodule = cls(
            **kwargs, **{name: value for name, value in own.items() if takes_any or name in known}
        )
        for name, datasets in given.items():
            if datasets is not None:
                make = partial(_loaders, datasets, is_shuffled=name == "train", **own)
                setattr(datamodule, f"{name}_dataloader", make)
        return datamodule

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a stage raises on this rank."""


def _check_datasets(argument: str, value: Any) -> None:
    """Raise InvalidTypeError unless a value is None, a data set, or a container of them."""
    for item in walked(value, lambda each: None if isinstance(each, Dataset) else contained(each)):
        if item is not None and contained(item) is None:
            expected = "a torch.utils.data.Dataset, or several in a list or dictionary"
            check_is_a(argument, item, Dataset, expected)


def _loaders(datasets: Any, *, is_shuffled: bool, batch_size: int, num_workers: int) -> Any:
    """Return a loader for each data set, in the same containers."""

    def loader(dataset: Any) -> DataLoader[Any]:
        shuffle = is_shuffled and not isinstance(dataset, IterableDataset)
        return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)

    return map_nested(datasets, (Dataset,), loader, each_place=True)
