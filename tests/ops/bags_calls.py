"""Calls of `hpnlp.ops.embeddings` with numpy arrays, for `test_numpy.py`."""

import numpy as np

from hpnlp.ops import embeddings
from hpnlp.ops.embeddings import KeyValueMemory

RNG = np.random.default_rng(0)
V, D, B, L = 6, 4, 3, 5
TABLE, IDS = RNG.standard_normal((V, D)), RNG.integers(0, V, (B, L))
X, LABELS = RNG.standard_normal((B, D)), np.array([0, 1, 1])
MEMORY = KeyValueMemory(
    RNG.standard_normal((7, D)), np.arange(7), np.arange(7), np.zeros(7, np.int64), np.array(7)
)  # fmt: skip
KEY = np.array([0, 7], np.uint32)

CALLS = {
    "embeddings.bags.embedding_bag": (
        (lambda *a: embeddings.embedding_bag(*a[:3], weights=a[3]), (TABLE, IDS, np.array([5, 1, 0]), IDS * 0.5)),
    ),
    "embeddings.bags.segment_embedding_bag": (
        (lambda *a: embeddings.segment_embedding_bag(*a, 3, unit=True), (TABLE, IDS[0], np.array([0, 0, 2, 2, -1]))),
    ),
    "embeddings.bags.pool_segments": (
        (lambda *a: embeddings.pool_segments(*a[:2], 2, mode="sqrt", weights=a[2]), (X, LABELS, np.ones(B))),
    ),
    "embeddings.bags.unit_norm": ((embeddings.unit_norm, (X,)),),
    "embeddings.row_gradients.scale_gradient": ((embeddings.scale_gradient, (X, np.ones(B))),),
    "embeddings.row_gradients.share_of_occurrences": ((lambda i: embeddings.share_of_occurrences(i, V), (IDS,)),),
    "embeddings.metric_losses.triplet_loss": (
        (lambda *a: embeddings.triplet_loss(*a, mining="all", margin=None), (X, LABELS)),
        (lambda *a: embeddings.triplet_loss(*a[:2], mask=a[2]), (X, LABELS, np.array([True, True, False]))),
    ),
    "embeddings.metric_losses.large_margin_loss": ((embeddings.large_margin_loss, (X, LABELS)),),
    "embeddings.neighbors.find_neighbors": ((lambda *a: embeddings.find_neighbors(*a, 2), (X, TABLE)),),
    "embeddings.neighbors.concat_nearest": (
        (lambda *a: embeddings.concat_nearest(*a[:2], 2, is_hidden=a[2]), (X, TABLE, np.eye(B, V, dtype=bool))),
    ),
    "embeddings.neighbors.neighbor_probabilities": (
        (lambda *a: embeddings.neighbor_probabilities(*a, V, temperature=0.1), (IDS * 0.1, IDS)),
    ),
    "embeddings.memory.memory_lookup": ((lambda *a: embeddings.memory_lookup(*a, 2), (MEMORY, X)),),
    "embeddings.memory.memory_loss": ((embeddings.memory_loss, (MEMORY, X, LABELS)),),
    "embeddings.memory.update_memory": (
        (lambda *a: embeddings.update_memory(*a, noise=0.1), (MEMORY, X, LABELS, KEY)),
        (lambda *a: embeddings.update_memory(*a[:3], rule="circular", mask=a[3]), (MEMORY, X, LABELS, LABELS > 0)),
    ),
    "embeddings.memory.orphaned_slots": ((embeddings.orphaned_slots, (MEMORY,)),),
}
# Functions that make arrays of lists of ids, of counts, and of sizes.
ON_HOST = {
    *("embeddings.bags.pad_bags", "embeddings.bags.join_bags", "embeddings.row_gradients.frequency_factors"),
    "embeddings.memory.empty_memory",
}
