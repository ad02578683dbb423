"""Names of `lightning.pytorch.tuner`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks import LearningRateFinder
from rankwise.errors import ConfigurationError
from rankwise.lightning._modules import add_other_names, refuse_missing_names

if TYPE_CHECKING:
    from rankwise.callbacks import LearningRateCurve
    from rankwise.lightning.core import LightningModule
    from rankwise.lightning.trainer import Trainer

__all__ = ["Tuner"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "tuning")


@final
class Tuner:
    """Search a learning rate for a trainer; see `LearningRateFinder`."""

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

    def scale_batch_size(self, *arguments: Any, **keywords: Any) -> None:
        """Refuse to search a batch size.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            message="Tuner.scale_batch_size() is not supported: rankwise does not search for a batch size.",
            remedy="give batch_size to the loader yourself.",
        )
