"""Split data loaders over the ranks, and combine several into one."""

from rankwise.data.combined_loader import CombinedLoader
from rankwise.data.iterable import ShardedIterable, ShardInfo, shard_info
from rankwise.data.sampler import ShardedSampler
from rankwise.data.sharding import shard_for_evaluation, shard_for_prediction, shard_for_training

__all__ = [
    "CombinedLoader",
    "ShardInfo",
    "ShardedIterable",
    "ShardedSampler",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
    "shard_info",
]
