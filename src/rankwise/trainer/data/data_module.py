"""`DataModule`: the loaders of all stages in one object; and `DataHooks`, which modules have, too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Self

from rankwise.checks import check_is_a, keywords_of
from rankwise.errors import ConfigurationError
from rankwise.hyperparameters import HyperparametersMixin
from rankwise.nested import contained, map_nested, to_device, walked
from rankwise.trainer.module_loading import LoadFromCheckpoint, load_data_module_from_checkpoint

if TYPE_CHECKING:
    from rankwise.trainer import Trainer

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class DataHooks:
    """The hooks of data; stages are `"fit"`, `"validate"`, `"test"` and `"predict"`.

    Attributes:
        prepare_data_per_node: whether `prepare_data` is called on each node; otherwise on the first one only.
    """

    prepare_data_per_node: bool = True
    _trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Download or unpack data; called in one process of each node, while the others wait."""

    def setup(self, stage: str) -> None:
        """Prepare this rank for a stage."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a stage, with or without an exception."""

    def train_dataloader(self) -> Any:
        """Return the loader of training batches, or several: a dictionary, a list, a `CombinedLoader`."""
        raise undefined(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """Return the loader, or several, of validation batches."""
        raise undefined(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the loader, or several, of test batches."""
        raise undefined(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the loader, or several, of batches to predict."""
        raise undefined(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device; in every stage."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on `device`: every tensor of it, also in nested containers."""
        strategy = None if self._trainer is None else self._trainer.strategy
        if strategy is None or device != strategy.root_device:
            return to_device(batch, device)
        return strategy.batch_to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step, on the device; in every stage."""
        return batch


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
        own = {"batch_size": batch_size, "num_workers": num_workers}
        known = keywords_of(cls.__init__, own)
        taken = {name: value for name, value in own.items() if name in known}
        datamodule = cls(**kwargs, **taken)
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


# ------------------------------------------------------------------ methods of modules and data modules


def prepares_data(owner: DataHooks, local_rank: int, node_rank: int) -> bool:
    """Return whether the process with these ids calls `prepare_data`."""
    return local_rank == 0 and (owner.prepare_data_per_node or node_rank == 0)


def is_own(owner: object, base: type, method: str) -> bool:
    """Return whether an object overrides a method of `base`. A value of None counts as undefined."""
    found = getattr(owner, method)
    return found is not None and getattr(found, "__func__", found) is not getattr(base, method)


def undefined(owner: object, method: str) -> ConfigurationError:
    """Return the error for a missing method."""
    name, is_loader = type(owner).__name__, method.endswith("dataloader")
    remedy = f"pass a loader, or define {name}.{method}(self)."
    return ConfigurationError(
        message=f"{name} does not define {method}().",
        remedy=remedy if is_loader else f"define {name}.{method}(self, batch, batch_idx).",
    )
