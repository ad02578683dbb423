"""Data: each rank's part of a data loader."""

from rankwise.data.batch_sizes import BatchSizes, batch_sizes
from rankwise.data.batch_stream import BatchStream, sharded_sampler_of, with_batch_stream
from rankwise.data.sampler import ShardedSampler
from rankwise.data.sharding import (
    check_shardable,
    is_shardable,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
)

__all__ = [
    "BatchStream",
    "BatchSizes",
    "ShardedSampler",
    "batch_sizes",
    "check_shardable",
    "is_shardable",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
    "sharded_sampler_of",
    "with_batch_stream",
]
