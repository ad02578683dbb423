"""Data: each rank's part of a data loader."""

from rankwise.data.sampler import ShardedSampler
from rankwise.data.sharding import (
    check_shardable,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
)

__all__ = [
    "ShardedSampler",
    "check_shardable",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
]
