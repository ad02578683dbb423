"""rankwise's strategies for Lightning: importing this registers them with its `Trainer` and its `Fabric`.

`Trainer(strategy="rankwise_ddp")` then works with each name of rankwise's DDP strategies, after `rankwise_`.
"""

from rankwise.errors import MissingExtraError

try:
    import lightning.pytorch  # noqa: F401  to say which extra is missing
except ImportError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    raise MissingExtraError(
        package="lightning", extra="lightning", purpose="Lightning on processes of rankwise"
    ) from None

from rankwise.integrations.lightning.fabric import RankwiseFabricStrategy, register_strategies
from rankwise.integrations.lightning.pytorch import RankwiseStrategy

register_strategies(RankwiseStrategy, RankwiseFabricStrategy)

__all__ = ["RankwiseFabricStrategy", "RankwiseStrategy"]
