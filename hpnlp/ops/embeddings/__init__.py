"""Embeddings: bags of vectors, gradients of rows by frequency, metric losses, nearest neighbours, a memory of rare events."""

from hpnlp.ops.embeddings.bags import (
    embedding_bag,
    join_bags,
    pad_bags,
    pool_segments,
    segment_embedding_bag,
    unit_norm,
)
from hpnlp.ops.embeddings.memory import (
    KeyValueMemory,
    empty_memory,
    memory_lookup,
    memory_loss,
    orphaned_slots,
    update_memory,
)
from hpnlp.ops.embeddings.metric_losses import large_margin_loss, triplet_loss
from hpnlp.ops.embeddings.neighbors import Neighbors, concat_nearest, find_neighbors, neighbor_probabilities
from hpnlp.ops.embeddings.row_gradients import frequency_factors, scale_gradient, share_of_occurrences

__all__ = [
    "KeyValueMemory", "Neighbors", "concat_nearest", "embedding_bag", "empty_memory", "find_neighbors", "frequency_factors",
    "join_bags", "large_margin_loss", "memory_lookup", "memory_loss", "neighbor_probabilities", "orphaned_slots", "pad_bags",
    "pool_segments", "scale_gradient", "segment_embedding_bag", "share_of_occurrences", "triplet_loss", "unit_norm",
    "update_memory",
]  # fmt: skip
