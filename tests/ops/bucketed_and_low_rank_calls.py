"""Calls of attention within buckets, low-rank attention and Synthesizers with numpy arrays, for `test_numpy.py`."""

import jax
import numpy as np

from hpnlp.ops import fourier
from hpnlp.ops.attention import Operands
from hpnlp.ops.attention.bucketed import attend, cache, hashing, sinkhorn, sinkhorn_cache
from hpnlp.ops.attention.low_rank import compression, nystrom, value_conv
from hpnlp.ops.attention.synthetic import attend as synthetic
from hpnlp.ops.attention.synthetic import factorized_dense, shared_scores

RNG = np.random.default_rng(0)


def x(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


Q, K, V, X = x(2, 12, 4, 8), x(2, 12, 2, 8), x(2, 12, 2, 8), x(2, 12, 16)
Q1, V1 = x(2, 1, 4, 8), x(2, 1, 2, 8)  # of one token
SEGMENTS = np.sort(RNG.integers(0, 3, (2, 12)), axis=1).astype(np.int32)
REAL = SEGMENTS > 0
BUCKETS = RNG.integers(0, 3, (2, 12, 4, 2)).astype(np.int32)
LENGTHS = np.array([7, 12], np.int32)
SETTINGS = sinkhorn.SortSettings(4, 3, 0.75, True)
NEAR, SELF_HIDDEN = attend.BucketSettings(3, True), attend.BucketSettings(3, True, hides_self=True)


def extend_buckets(k, v, buckets, lengths, *of_token):
    past = cache.start_bucket_cache(k, v, buckets, lengths, 16)
    return cache.extend_bucket_cache(*of_token, past, NEAR)[0]


def extend_sinkhorn(q, k, v, lengths, *of_token):
    past = sinkhorn_cache.start_sinkhorn_cache(q, k, v, lengths, SETTINGS, 16)
    return sinkhorn_cache.extend_sinkhorn_cache(*of_token, past, SETTINGS)[0]


CALLS = {
    "fourier.fourier_mix": ((fourier.fourier_mix, (X,)),),
    "fourier.fourier_mix_reference": ((fourier.fourier_mix_reference, (X,)),),
    "attention.bucketed.attend.bucketed_attention": (
        (lambda *a: attend.bucketed_attention(*a, SELF_HIDDEN), (Q, K, V, BUCKETS)),
        (
            lambda *a: attend.bucketed_attention(*a[:4], attend.BucketSettings(3, False), segment_ids=a[4]),
            (Q, K, V, BUCKETS, SEGMENTS),
        ),
    ),
    "attention.bucketed.attend.bucketed_reference": (
        (lambda *a: attend.bucketed_reference(*a[:4], NEAR, segment_ids=a[4]), (Q, K, V, BUCKETS, SEGMENTS)),
    ),
    "attention.bucketed.cache.start_bucket_cache": (
        (lambda *a: cache.start_bucket_cache(*a, 16), (Q, V, BUCKETS, LENGTHS)),
    ),
    "attention.bucketed.cache.extend_bucket_cache": (
        (extend_buckets, (Q, V, BUCKETS, LENGTHS, Q1, Q1, V1, BUCKETS[:, :1])),
    ),
    "attention.bucketed.hashing.random_rotations": (
        (lambda key: hashing.random_rotations(key, 2, 8, 4), (jax.random.key(0),)),
    ),
    "attention.bucketed.hashing.lsh_buckets": ((hashing.lsh_buckets, (Q, x(2, 8, 3))),),
    "attention.bucketed.hashing.unit_vectors": ((hashing.unit_vectors, (Q,)),),
    "attention.bucketed.hashing.nearest_centroids": ((hashing.nearest_centroids, (Q, x(4, 3, 8))),),
    "attention.bucketed.sinkhorn.sinkhorn_attention": (
        (lambda *a: sinkhorn.sinkhorn_attention(*a[:3], SETTINGS, segment_ids=a[3]), (Q, K, V, SEGMENTS)),
    ),
    "attention.bucketed.sinkhorn_cache.start_sinkhorn_cache": (
        (lambda *a: sinkhorn_cache.start_sinkhorn_cache(*a, SETTINGS, 16), (Q, K, V, LENGTHS)),
    ),
    "attention.bucketed.sinkhorn_cache.extend_sinkhorn_cache": ((extend_sinkhorn, (Q, K, V, LENGTHS, Q1, V1, V1)),),
    "attention.low_rank.compression.project_tokens": ((compression.project_tokens, (K, x(3, 12), REAL)),),
    "attention.low_rank.compression.pool_tokens": ((lambda a, r: compression.pool_tokens(a, 5, r), (K, REAL)),),
    "attention.low_rank.compression.convolve_tokens": ((compression.convolve_tokens, (K, x(5, 2, 8), REAL)),),
    "attention.low_rank.nystrom.nystrom_attend": (
        (lambda q, k, v, r: nystrom.nystrom_attend(q, k, v, 3, r), (Q, K, V, REAL)),
    ),
    "attention.low_rank.nystrom.pseudo_inverse": ((nystrom.pseudo_inverse, (x(2, 3, 3),)),),
    "attention.low_rank.nystrom.nystrom_reference": (
        (lambda q, k, v, r: nystrom.nystrom_reference(q, k, v, 3, r), (Q, K, V, REAL)),
    ),
    "attention.low_rank.value_conv.value_conv": ((value_conv.value_conv, (V, x(3, 4))),),
    "attention.low_rank.value_conv.value_conv_reference": ((value_conv.value_conv_reference, (V, x(3, 4))),),
    "attention.synthetic.factorized_dense.factorized_dense_attend": (
        (
            lambda v, a, b, ids: factorized_dense.factorized_dense_attend(v, a, b, operands=Operands(segment_ids=ids)),
            (Q, x(2, 12, 4, 3), x(2, 12, 4, 4), SEGMENTS),
        ),
    ),
    "attention.synthetic.attend.synthetic_attend": (
        (lambda v, a, b, s: synthetic.synthetic_attend(v, [(a, b)], [s]), (V, Q, K, x(1, 4, 12, 12))),
    ),
    "attention.synthetic.attend.synthetic_attend_reference": (
        (lambda v, a, b, s: synthetic.synthetic_attend_reference(v, [(a, b)], [s]), (V, Q, K, x(1, 4, 12, 12))),
    ),
    "attention.synthetic.shared_scores.shared_scores_attend": (
        (lambda v, s: shared_scores.shared_scores_attend(v, s), (Q, x(4, 12, 12))),
    ),
    "attention.synthetic.attend.tiled_scores": (
        (lambda a, b: synthetic.tiled_scores(a, b, 12), (x(2, 12, 4, 3), x(2, 12, 4, 4))),
    ),
}
# Functions that only other ops call.
BY_OPS = {
    *(f"attention.bucketed.attend.{name}" for name in ("visible_pairs", "without_self")),
    *(
        f"attention.bucketed.sinkhorn.{name}"
        for name in ("balance", "block_sums", "in_blocks", "mixtures", "sort_weights")
    ),
    "attention.low_rank.compression.padding_ids",
    "dropout.check_rate",
}
INTERNAL = {"attention.bucketed.order", "attention.bucketed.tiles"}
