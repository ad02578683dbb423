"""Split data loaders over the ranks."""

from rankwise.data.batches import (
    BatchSizes,
    BatchStream,
    batch_sizes,
    sharded_sampler_of,
    with_batch_stream,
)
from rankwise.data.iterable import ShardedIterable, ShardInfo, shard_info
from rankwise.data.sampler import ShardedSampler, set_epoch_of
from rankwise.data.sharding import (
    batches_before_split,
    check_interleaved_by_batches,
    check_shardable,
    in_dataset_order,
    is_shardable,
    is_split,
    order_seed,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
)

__all__ = [
    "BatchStream",
    "BatchSizes",
    "ShardInfo",
    "ShardedIterable",
    "ShardedSampler",
    "batch_sizes",
    "batches_before_split",
    "check_interleaved_by_batches",
    "check_shardable",
    "in_dataset_order",
    "is_shardable",
    "is_split",
    "order_seed",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
    "shard_info",
    "sharded_sampler_of",
    "set_epoch_of",
    "with_batch_stream",
]
