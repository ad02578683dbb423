"""Names of `lightning.pytorch.tuner`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks import LearningRateFinder
from rankwise.errors import ConfigurationError, InvalidArgumentError
from rankwise.lightning._batch_size_search import BatchSizeSearch
from rankwise.lightning._modules import complete_module
from rankwise.lightning.core import LightningDataModule
from rankwise.ranks import rank_zero_warn

if TYPE_CHECKING:
    from rankwise.callbacks import LearningRateCurve
    from rankwise.lightning.core import LightningModule
    from rankwise.lightning.trainer import Trainer

__all__ = ["Tuner"]

__getattr__ = complete_module(__name__)


@final
class Tuner:
    """Search a learning rate, see `LearningRateFinder`, or a batch size for a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateCurve | None:
        """Search a learning rate, and set it in the module; None in a trial run.

        A search has no validation: `val_dataloaders` are not used.

        Raises:
            ConfigurationError: for another stage's `method` and `dataloaders`, and as `LearningRateFinder`.
        """
        if method != "fit" or dataloaders is not None:
            raise ConfigurationError(
                message="Tuner.lr_find() searches a learning rate for fit() only.",
                facts=f"method={method!r}, dataloaders={dataloaders!r}.",
                remedy="lr_find(model, train_dataloaders=...).",
            )
        finder = LearningRateFinder(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name
        )
        finder.check_stage(self._trainer, model, "fit")
        finder.lr_find(self._trainer, model, train_dataloaders, datamodule)
        return finder.optimal_lr

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search the largest batch size for which there is memory, and set it; None in a trial run.

        Copies of the module run a few batches with one size after another. Sizes that take all data at once
        are not exceeded. Weights, random state and progress are afterwards as before; data modules are used,
        and `prepare_data` and `setup` called, in each trial.

        Args:
            model: the module; it, its data module or their `hparams` have the batch size, which their methods
                that return loaders read.
            train_dataloaders: not possible, as all loaders: their batch size cannot be changed.
            val_dataloaders: likewise.
            dataloaders: likewise.
            datamodule: the data module, if there is one.
            method: the stage that is tried: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            mode: `"power"` doubles the size until it does not fit, `"binsearch"` bisects then.
            steps_per_trial: how many batches a trial has of each kind, at least 2.
            init_val: the first size.
            max_trials: how many sizes are tried at most.
            batch_arg_name: the name of the attribute or hyperparameter.
            margin: which fraction `"binsearch"` takes off at the end.
            max_val: the largest size that is tried.

        Raises:
            InvalidArgumentError: for arguments out of range.
            ConfigurationError: for loaders, a module without that attribute, or one that cannot be copied;
                if no size fits; and in a process that is one of several ranks.
        """
        given = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders}
        if isinstance(train_dataloaders, LightningDataModule) and datamodule is None:
            given["train_dataloaders"], datamodule = None, train_dataloaders
        for name, value in {**given, "dataloaders": dataloaders}.items():
            if value is not None:
                raise ConfigurationError(
                    message=f"scale_batch_size({name}=...) is not possible: a loader's batch size is fixed.",
                    remedy=f"return it from {type(model).__name__}, or from a data module, as their "
                    f"{batch_arg_name} says.",
                )
        search = BatchSizeSearch(
            *(self._trainer, model, datamodule, method, mode, steps_per_trial, max_trials),
            *(batch_arg_name, margin, max_val),
        )
        if init_val < 1:
            raise InvalidArgumentError(argument="init_val", value=init_val, expected="1 or more")
        if self._trainer.fast_dev_run:
            rank_zero_warn("scale_batch_size() does not search in a trial run (fast_dev_run).")
            return None
        return search.run(init_val)
