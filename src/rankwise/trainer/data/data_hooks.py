"""`DataHooks`: the hooks that modules and data modules share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.nested import to_device

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


def prepares_data(owner: DataHooks, local_rank: int, node_rank: int) -> bool:
    """Return whether the process with these ids calls `prepare_data`."""
    return local_rank == 0 and (owner.prepare_data_per_node or node_rank == 0)


def own_methods(owner: object, base: type, methods: Iterable[str]) -> list[str]:
    """Return the names of the methods of `base` that an object overrides."""
    found = {method: getattr(owner, method) for method in methods}
    return [
        name
        for name, method in found.items()
        if method is not None and getattr(method, "__func__", method) is not getattr(base, name)
    ]


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
