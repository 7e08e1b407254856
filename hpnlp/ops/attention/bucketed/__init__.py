"""Attention within buckets of tokens: hashed (Reformer), clustered (Routing Transformer)."""

from hpnlp.ops.attention.bucketed.attend import BucketSettings, bucketed_attention, bucketed_reference, visible_pairs
from hpnlp.ops.attention.bucketed.cache import BucketCache, extend_bucket_cache, start_bucket_cache
from hpnlp.ops.attention.bucketed.hashing import lsh_buckets, nearest_centroids, random_rotations, unit_vectors

__all__ = [
    "BucketCache", "BucketSettings", "bucketed_attention", "bucketed_reference", "extend_bucket_cache", "lsh_buckets",
    "nearest_centroids", "random_rotations", "start_bucket_cache", "unit_vectors", "visible_pairs",
]  # fmt: skip
