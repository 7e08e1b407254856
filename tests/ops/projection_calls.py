"""Calls of the operations of projection networks with numpy arrays, for `test_numpy.py`."""

import numpy as np

from hpnlp.ops import ngram_attention, word_projection

RNG = np.random.default_rng(0)
HASHES = RNG.integers(-(2**31), 2**31, (2, 3, 4), dtype=np.int32)
X, KERNELS = RNG.standard_normal((2, 2, 3, 4)), RNG.standard_normal((2, 8, 5))

CALLS = {
    "word_projection.ternary_features": ((lambda h: word_projection.ternary_features(h, 64), (HASHES,)),),
    "word_projection.projected_product": ((word_projection.projected_product, (HASHES, RNG.standard_normal((64, 3)))),),
    "ngram_attention.ngram_attention": (
        (
            lambda *a: ngram_attention.ngram_attention(*a, offsets=(0, 1)),
            (*X, *KERNELS, RNG.standard_normal(5), np.ones((2, 3), bool)),
        ),
    ),
}
ON_HOST = {"word_projection.check_features"}
